"""What the workflows run is what the documentation and tox.ini say, pinned and with the least permissions."""

from __future__ import annotations

import configparser
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
SPOKEN = re.compile(r"^\$ (.*)$|`([^`\n]+)`", re.MULTILINE)
ENVIRONMENT = re.compile(r"torch(\d+|_newest)|lint|actionlint")


def workflow(name: str) -> dict[Any, Any]:
    """One workflow. YAML 1.1 reads the key ``on`` as True."""
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))
    return loaded


def steps(name: str) -> Iterator[dict[str, Any]]:
    """Every step of every job."""
    for job in workflow(name)["jobs"].values():
        yield from job["steps"]


def written() -> set[tuple[str, ...]]:
    """Every command of the documentation: lines after a prompt without words behind, parts of a line, code spans."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = ["".join(match) for match in SPOKEN.findall(text)]
    return {parsed(part) for line in lines for part in re.split(r" && | {2,}", line)}


def parsed(command: str) -> tuple[str, ...]:
    """A command's words, as a shell takes them apart; a code span that is no command has none."""
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return ()


def expanded(name: str, step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The command of a step with each value of its variables: a matrix's choices, an input's default or example."""
    spelled = re.sub(r" \$\{EXCUSES:\+[^}]*\}", "", step["run"].strip())  # nothing, as the input is empty unless given
    values = {key: choices(name, str(value)) for key, value in step.get("env", {}).items()}
    for combination in itertools.product(*values.values()):
        command = spelled
        for key, value in zip(values, combination, strict=True):
            command = command.replace(f"${key}", value)
        yield parsed(command)


def choices(name: str, expression: str) -> list[str]:
    """What ``${{ matrix.KEY }}`` or ``${{ inputs.KEY }}`` may stand for."""
    kind, _, key = expression.strip("${} ").partition(".")
    if kind == "inputs":
        given = workflow(name)[True]["workflow_call"]["inputs"][key]
        return [example()[key] if given.get("required") else given["default"]]
    return list(workflow(name)["jobs"]["torch"]["strategy"]["matrix"][key])


def example() -> dict[str, str]:
    """What the caller of compare.yml in the documentation gives it."""
    text = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    given: dict[str, str] = yaml.safe_load(block)["jobs"]["zharness"]["with"]
    return given


def environments() -> set[str]:
    """Every environment that tox.ini spells out, with its braces expanded."""
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini")
    names = [section.removeprefix("testenv:") for section in parser.sections() if section.startswith("testenv:")]
    found = {name for name in names if "{" not in name}
    for head, choices in (re.fullmatch(r"(\w+)\{(.*)\}", name).groups() for name in names if "{" in name):  # type: ignore[union-attr]
        found.update(head + choice for choice in choices.split(","))
    return found


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_what_the_documentation_says(name: str) -> None:
    unknown = [step["run"] for step in steps(name) if "run" in step and not written() & set(expanded(name, step))]
    assert not unknown, f"say it in README.md or docs/ as it stands in {name}, or run what is said there: {unknown}"


def test_the_environments_of_tox_that_workflows_name_exist() -> None:
    named = {found[0] for path in WORKFLOWS.values() for found in ENVIRONMENT.finditer(path.read_text("utf-8"))}
    matrix = workflow("test.yml")["jobs"]["torch"]["strategy"]["matrix"]
    assert {"lint", "actionlint", "torch_newest", *matrix["torch"]} <= named
    assert set(matrix["torch"]) | {"lint", "actionlint", "torch_newest"} <= environments()


def test_every_engine_meets_every_torch_release_and_deepspeed_those_that_have_it() -> None:
    matrix = workflow("test.yml")["jobs"]["torch"]["strategy"]["matrix"]
    assert set(matrix["engine"]) == {"reference", "fsdp2", "ddp", "zero1"}
    with_deepspeed = {entry["torch"] for entry in matrix["include"] if entry["engine"] == "deepspeed"}
    (line,) = re.findall(r"^ *([\w,]+): deepspeed$", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    assert with_deepspeed == set(line.split(","))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_the_source_and_nothing_else(name: str) -> None:
    assert workflow(name)["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow(name)["jobs"].values())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_pinned_to_a_commit(name: str) -> None:
    used = [step["uses"] for step in steps(name) if "uses" in step]
    loose = [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]
    assert not loose, loose


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_key_of_a_cache_holds_what_a_caller_wrote(name: str) -> None:
    # A key with a comma is refused, and a requirement such as zharness[deepspeed,test] has one.
    keys = [step["with"].get("key", "") for step in steps(name) if "actions/cache" in step.get("uses", "")]
    assert not [key for key in keys if "inputs." in key]


def test_what_is_installed_in_an_engines_repository_is_named_by_that_repository() -> None:
    # By name alone it would come from an index, where the name may be anybody's.
    requirement = workflow("compare.yml")[True]["workflow_call"]["inputs"]["requirement"]
    assert requirement["required"] is True
    assert "default" not in requirement


def test_the_weekly_record_is_kept_before_anything_that_may_fail_by_what_it_finds() -> None:
    said = [step.get("run", step.get("uses", "")) for step in workflow("newest.yml")["jobs"]["deepspeed"]["steps"]]
    recorded, saved, watched = (
        next(at for at, text in enumerate(said) if part in text)
        for part in ("zharness check", "actions/cache/save", "zharness releases")
    )
    assert recorded < saved < watched


def test_every_reproduction_runs_each_week() -> None:
    assert any(step.get("run", "").startswith("zharness repro --all") for step in steps("newest.yml"))


def test_linters_of_workflows_find_nothing() -> None:
    # actionlint has an environment of its own in tox.ini: its package fetches a program when it is built.
    linters = {"zizmor": ("--offline", "--no-progress"), "actionlint": ()}
    scripts = sysconfig.get_path("scripts")
    found = {name: shutil.which(name, path=scripts) or shutil.which(name) for name in linters}
    assert found["zizmor"], f"zizmor is not in {sys.prefix}; install the package's extra 'test'"
    for name, program in found.items():
        if program is not None:
            done = subprocess.run(
                [program, *linters[name], *map(str, WORKFLOWS.values())], capture_output=True, text=True, cwd=ROOT
            )
            assert done.returncode == 0, done.stdout + done.stderr
