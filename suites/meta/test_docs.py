"""No documented command rots: each is held against the command line, and those that take seconds are run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import pytest

from suites.meta.documents import PAGES, ROOT, Command, anchors, blocks, commands, files, links, spans
from suites.meta.test_workflows import environments
from suites.warm import programs
from zharness.cell import Cell
from zharness.cli import cli
from zharness.laws import get_law

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPOKEN = [command for page in PAGES for command in commands(page)]
CASE = re.compile(r"\w+\.\w+\[.*\]")
# Run, with the exit code that the text around them says; all others are parsed alone.
RUN = {
    "zharness check 'training.grads[reference-zero3-w2-fp32-mlp]'": 0,
    "zharness check training.grads --engine zharness.mutants:loses_the_shards_edge --stage 2 --model mlp "
    "--jsonl failing.jsonl": 1,
    "zharness report failing.jsonl --html failing.html": 1,
    "zharness list engines": 0,
    "python verify_my_model.py": 0,
    "pytest test_shards.py": 0,
    "pytest test_my_engine.py": 0,
}


def of_click(command: Command, root: Path) -> None:
    """Parse a command of this package as click does, in a folder that has the files which it is to read."""
    name, *words = command.words[1:]
    if name in ("--help", "--version"):
        return
    found = cli.commands[name]
    for word in (word for word in words if word.endswith((".jsonl", ".json", ".toml"))):
        (root / Path(word).name).touch()
    with suppress(click.exceptions.Exit):  # of --help
        found.make_context(name, [Path(word).name if word.endswith(".jsonl") else word for word in words])
    for case in filter(CASE.fullmatch, words):
        get_law(Cell.parse(case).law)


def of_python(command: Command, root: Path) -> None:
    """A script of this repository, whose source has the options; one of a page, or a module of this package."""
    script, *words = command.words[1:]
    if script == "-m":
        of_program(Command(command.page, command.line, tuple(words)), root)
    elif "/" in script:
        assert (ROOT / script).is_file(), script
        source = "".join(
            path.read_text(encoding="utf-8") for path in [ROOT / script, *(ROOT / "scripts").glob("*/*.py")]
        )
        assert not [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    else:
        assert script in written(), script


def of_torchrun(command: Command, root: Path) -> None:
    """What it launches."""
    at = next(i for i, word in enumerate(command.words) if word == "-m" or word.endswith(".py"))
    of_python(Command(command.page, command.line, ("python", *command.words[at:])), root)


def of_pytest(command: Command, _root: Path) -> None:
    """Paths that are there, or files of a page, and options that pytest has with this plugin."""
    words = [word.partition("=")[0] for word in command.words[1:]]
    paths = [word for word in words if word.endswith(".py") or word in ("repro", "suites")]
    assert all((ROOT / path).exists() or path in written() for path in paths), paths
    known = {*PYTEST_OPTIONS, "-n", "-k", "-m", "-x", "-s", "-v"}
    assert not [word for word in words if word.startswith("-") and word not in known]


def of_pip(command: Command, _root: Path) -> None:
    """Extras that the package has, and files of constraints that are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for found in re.findall(r"(?:\.|zharness)\[([\w,]+)\]", command.line) for extra in found.split(",")}
    assert extras <= set(project["optional-dependencies"])
    assert all((ROOT / word).is_file() for word in command.words if word.endswith(".txt"))


def of_tox(command: Command, _root: Path) -> None:
    named = command.words[command.words.index("-e") + 1].split(",")
    assert set(named) <= environments()


def of_git(_command: Command, _root: Path) -> None:
    """Nothing of ours."""


PROGRAMS: dict[str, Callable[[Command, Path], None]] = {
    "zharness": of_click,
    "python": of_python,
    "torchrun": of_torchrun,
    "pytest": of_pytest,
    "pip": of_pip,
    "tox": of_tox,
    "git": of_git,
}
# Those of this plugin and of the ones that the tests need; `pytest --help` takes a second.
PYTEST_OPTIONS = frozenset({"--engine", "--isolation", "--dist", "--excuses", "--shuffle", "--stage"})


def of_program(command: Command, root: Path) -> None:
    PROGRAMS[command.words[0]](command, root)


def written() -> set[str]:
    """The files that a reader has after following the pages: their own, and what commands of theirs write."""
    outputs = (command.words[command.words.index("-o") + 1] for command in SPOKEN if "-o" in command.words)
    return {*outputs, *(name for page in PAGES for name in files(page))}


@pytest.mark.parametrize("command", SPOKEN, ids=lambda command: f"{command.page}: {command.line}")
def test_a_command_of_the_documentation_is_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of_program(command, tmp_path)


def test_options_that_the_text_names_are_the_command_s() -> None:
    for command in (span for page in PAGES for span in spans(page)):
        known = {option for param in cli.commands[command.words[1]].params for option in param.opts}
        asked = {word for word in command.words[2:] if word.startswith("-")}
        assert asked <= known | {"--help"}, command


def test_every_command_is_in_the_documentation() -> None:
    assert {command.words[1] for command in SPOKEN if command.words[0] == "zharness"} >= set(cli.commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_readme_leads_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(links(PAGES[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_documentation_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def test_a_newcomer_s_commands_do_what_the_readme_says(tmp_path: Path) -> None:
    for name, text in files(PAGES[0]).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    left = dict(RUN)
    for command in commands(PAGES[0]):
        if command.line in left:
            done = run(command, tmp_path)
            assert done.returncode == left.pop(command.line), done.stdout + done.stderr
    assert not left, f"no longer in README.md: {list(left)}"
    assert "<title>zharness" in (tmp_path / "failing.html").read_text(encoding="utf-8")


def run(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of a page as its reader types it, with the interpreter of these tests.

    Only a script gets a newly started Python; the other commands run in forks of one that has imported torch.
    """
    program, *words = command.words
    modules = {"zharness": ("-m", "zharness"), "pytest": ("-m", "pytest", "-p", "no:cacheprovider"), "python": ()}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if program != "python":
        return programs.run(*modules[program], *words, folder=folder, environment=environment)
    return subprocess.run(
        [sys.executable, *modules[program], *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_ranks_of_the_example_end_as_the_page_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "ranks.md"
    (tmp_path / "test_ranks.py").write_text(files(page)["test_ranks.py"], encoding="utf-8")
    done = run(Command(page.name, "", ("pytest", "test_ranks.py")), tmp_path)
    (shown,) = re.findall(r"^rank 1 failed first, .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown in done.stdout, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout


def test_the_example_of_tolerance_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "tolerance.md"
    exec(compile(files(page)["how_equal.py"], "how_equal.py", "exec"), {})  # noqa: S102 - our own page
    told = capsys.readouterr().out
    assert told.count("of the bound") == 5
    assert told in page.read_text(encoding="utf-8")


def test_the_models_of_the_documentation_give_a_model_batches_and_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    names: dict[str, object] = {}
    exec(compile(files(PAGES[0])["my_model.py"], "my_model.py", "exec"), names)  # noqa: S102 - our own page
    factory = names["factory"]
    assert callable(factory)
    model, batch, loss = factory()
    inputs = batch(torch.Generator().manual_seed(0))
    assert loss(model(*inputs), inputs).requires_grad
