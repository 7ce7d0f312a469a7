"""Check every documented command against the command line, and run those that take seconds."""

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

from suites.meta.documents import (
    PAGES,
    ROOT,
    Command,
    code_blocks,
    heading_anchors,
    local_links,
    parse_commands,
    parse_inline_commands,
    python_files,
)
from suites.meta.test_workflows import tox_environments
from suites.warm import programs
from zharness.cell import Cell
from zharness.cli import cli
from zharness.laws import get_law
from zharness.toml_text import parse_toml

DOCUMENTED_COMMANDS = [command for page in PAGES for command in parse_commands(page)]
CELL_ID = re.compile(r"\w+\.\w+\[.*\]")
FOLDER_OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(work|root|home|tmp|var/tmp)/\S*")
# Commands that are executed, with their documented exit codes. All other commands are only parsed.
YOUR_MODEL = ROOT / "docs" / "your-model.md"
LONGEST_README = 250  # lines; tables and long outputs have pages of their own
EXECUTED_COMMANDS = {
    "zharness tour": 0,
    "zharness check 'training.grads[reference-zero3-w2-fp32-mlp]'": 0,
    "zharness check training.grads --engine zharness.mutants:loses_the_shards_edge --stage 2 --model mlp "
    "--jsonl failing.jsonl": 1,
    "zharness report failing.jsonl --html failing.html": 1,
    "zharness list engines": 0,
    "python verify_my_model.py": 0,
    "pytest test_shards.py": 0,
    "pytest test_my_engine.py": 0,
}


def check_zharness_command(command: Command, root: Path) -> None:
    """Parse a zharness command with click, in a folder that contains the files that it reads."""
    name, *message = command.arguments[1:]
    if name in ("--help", "--version"):
        return
    found = cli.commands[name]
    for word in (word for word in message if word.endswith((".jsonl", ".json", ".toml"))):
        (root / Path(word).name).touch()
    with suppress(click.exceptions.Exit):  # of --help
        found.make_context(name, [Path(word).name if word.endswith(".jsonl") else word for word in message])
    for case in filter(CELL_ID.fullmatch, message):
        get_law(Cell.parse(case).law)


def check_python_command(command: Command, root: Path) -> None:
    """Check that the script exists and has the options, or that the module is one of this package."""
    script, *message = command.arguments[1:]
    if script == "-m":
        check_command(Command(command.page, command.line, tuple(message)), root)
    elif "/" in script:
        assert (ROOT / script).is_file(), script
        source = "".join(
            path.read_text(encoding="utf-8") for path in [ROOT / script, *(ROOT / "scripts").glob("*/*.py")]
        )
        assert not [word for word in message if word.startswith("--") and f'"{word}"' not in source]
    else:
        assert script in reader_files(), script


def check_torchrun_command(command: Command, root: Path) -> None:
    """Check the script or module that torchrun launches."""
    at = next(i for i, word in enumerate(command.arguments) if word == "-m" or word.endswith(".py"))
    check_python_command(Command(command.page, command.line, ("python", *command.arguments[at:])), root)


def check_pytest_command(command: Command, _root: Path) -> None:
    """Check that paths exist, here or on a page, and that pytest or this plugin has the options."""
    message = [word.partition("=")[0] for word in command.arguments[1:]]
    paths = [word for word in message if word.endswith(".py") or word in ("repro", "suites")]
    assert all((ROOT / path).exists() or path in reader_files() for path in paths), paths
    known = {*PYTEST_OPTIONS, "-n", "-p", "-k", "-m", "-x", "-s", "-v"}
    assert not [word for word in message if word.startswith("-") and word not in known]


def check_pip_command(command: Command, _root: Path) -> None:
    """Check that the package has the extras, and that the constraint files exist."""
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")["project"]
    extras = {extra for found in re.findall(r"(?:\.|zharness)\[([\w,]+)\]", command.line) for extra in found.split(",")}
    assert extras <= set(project["optional-dependencies"])
    assert all((ROOT / word).is_file() for word in command.arguments if word.endswith(".txt"))


def check_tox_command(command: Command, _root: Path) -> None:
    named = command.arguments[command.arguments.index("-e") + 1].split(",")
    assert set(named) <= tox_environments()


def check_bash_command(command: Command, _root: Path) -> None:
    """Check that the script exists."""
    assert (ROOT / command.arguments[1]).is_file(), command.arguments[1]


def accept_foreign_command(_command: Command, _root: Path) -> None:
    """Accept a command of which nothing is part of this project."""


PROGRAMS: dict[str, Callable[[Command, Path], None]] = {
    "zharness": check_zharness_command,
    "python": check_python_command,
    "torchrun": check_torchrun_command,
    "pytest": check_pytest_command,
    "pip": check_pip_command,
    "bash": check_bash_command,
    "tox": check_tox_command,
    "git": accept_foreign_command,
    "build": accept_foreign_command,
}
# Options of this plugin and of the plugins that the tests need. Listed here because `pytest --help` takes a second.
PYTEST_OPTIONS = frozenset(
    (
        *("--engine", "--pyargs", "--isolation", "--dist", "--expected-failures", "--excuses", "--shuffle", "--stage"),
        "--exhaustive",  # of conftest.py
    )
)


def check_command(command: Command, root: Path) -> None:
    PROGRAMS[command.arguments[0]](command, root)


def reader_files() -> set[str]:
    """Return the files that a reader of the pages has: those on the pages, and those that commands write with -o."""
    outputs = (
        command.arguments[command.arguments.index("-o") + 1]
        for command in DOCUMENTED_COMMANDS
        if "-o" in command.arguments
    )
    return {*outputs, *(name for page in PAGES for name in python_files(page))}


@pytest.mark.parametrize("command", DOCUMENTED_COMMANDS, ids=lambda command: f"{command.page}: {command.line}")
def test_a_documented_command_exists(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_command(command, tmp_path)


def test_options_in_inline_code_exist() -> None:
    for command in (span for page in PAGES for span in parse_inline_commands(page)):
        known = {option for param in cli.commands[command.arguments[1]].params for option in param.opts}
        requested = {word for word in command.arguments[2:] if word.startswith("-")}
        assert requested <= known | {"--help"}, command


def test_every_command_is_in_the_documentation() -> None:
    assert {command.arguments[1] for command in DOCUMENTED_COMMANDS if command.arguments[0] == "zharness"} >= set(
        cli.commands
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_have_targets(page: Path) -> None:
    for target in local_links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in heading_anchors(there), target


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= LONGEST_README


def test_no_page_has_a_path_of_one_machine() -> None:
    assert FOLDER_OF_ONE_MACHINE.search("file /tmp/deepspeed-files-t488c6ka/tests/unit/test_zero.py")
    folders = [
        f"{page.name}: {match[0]}"
        for page in (*PAGES, *(ROOT / name for name in ("FINDINGS.md", "CHANGELOG.md", "SECURITY.md")))
        for match in FOLDER_OF_ONE_MACHINE.finditer(page.read_text(encoding="utf-8"))
    ]
    assert not folders, f"{folders}; give paths in the repository, or ones that every reader has"


def test_the_readme_links_to_every_page() -> None:
    assert {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} <= set(local_links(PAGES[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_documentation_compiles(page: Path) -> None:
    for block in code_blocks(page, "python"):
        ast.parse(block)


def test_the_readme_commands_exit_as_documented(tmp_path: Path) -> None:
    for name, text in (python_files(YOUR_MODEL) | python_files(PAGES[0])).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    left = dict(EXECUTED_COMMANDS)
    for command in (*parse_commands(PAGES[0]), *parse_commands(YOUR_MODEL)):
        if command.line in left:
            done = run_as_reader(command, tmp_path)
            assert done.returncode == left.pop(command.line), done.stdout + done.stderr
    assert not left, f"no longer in README.md or docs/your-model.md: {list(left)}"
    assert "<title>zharness" in (tmp_path / "failing.html").read_text(encoding="utf-8")


def run_as_reader(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a documented command with the interpreter of these tests.

    A script gets a new Python process; other commands run in forks of a process that has imported torch.
    """
    program, *message = command.arguments
    modules = {"zharness": ("-m", "zharness"), "pytest": ("-m", "pytest", "-p", "no:cacheprovider"), "python": ()}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if program != "python":
        return programs.run(*modules[program], *message, folder=folder, environment=environment)
    return subprocess.run(
        [sys.executable, *modules[program], *message], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_example_of_ranks_fails_as_documented(tmp_path: Path) -> None:
    page = ROOT / "docs" / "ranks.md"
    (tmp_path / "test_ranks.py").write_text(python_files(page)["test_ranks.py"], encoding="utf-8")
    done = run_as_reader(Command(page.name, "", ("pytest", "test_ranks.py")), tmp_path)
    (shown,) = re.findall(r"^rank 1 failed first, .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown in done.stdout, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout


def test_the_example_of_tolerance_prints_the_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "tolerance.md"
    exec(compile(python_files(page)["how_equal.py"], "how_equal.py", "exec"), {})  # noqa: S102 - the page is part of this repository
    printed = capsys.readouterr().out
    assert printed.count("of the bound") == 5
    assert printed in page.read_text(encoding="utf-8")


def test_the_documented_model_factory_returns_model_batch_and_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    names: dict[str, object] = {}
    exec(compile(python_files(PAGES[0])["my_model.py"], "my_model.py", "exec"), names)  # noqa: S102 - the page is part of this repository
    factory = names["factory"]
    assert callable(factory)
    model, batch, loss = factory()
    inputs = batch(torch.Generator().manual_seed(0))
    assert loss(model(*inputs), inputs).requires_grad


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [command.line for command in parse_commands(PAGES[0])]
    (command,) = re.findall(r"^pytest [^|\n]*", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert command.strip() in lines


def test_the_glossary_has_at_most_70_terms() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len([term for term in rows if term != "term"]) <= 70
