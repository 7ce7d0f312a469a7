"""Check that workflows run documented commands, with pinned actions and the least permissions."""

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
from typing import Any

import pytest
import yaml
from packaging.version import Version

import zharness
from suites.meta.documents import PAGES, ROOT
from zharness.run.reach import REACH_VERSION

WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
ACTION = "check"
ACTIONS = {ACTION: ROOT / ".github" / "actions" / ACTION / "action.yml"}
DOCUMENTED_COMMAND = re.compile(r"^\$ (.*)$|`([^`\n]+)`", re.MULTILINE)
# The permissions of the jobs that publish, in the order of the jobs; every other job may only read.
WRITING_JOBS = {"release.yml": [{"id-token": "write"}], "site.yml": [{"pages": "write", "id-token": "write"}]}
ENVIRONMENT = re.compile(r"torch(\d+|_newest)|lint|actionlint")


def load_workflow(name: str) -> dict[Any, Any]:
    """Load one workflow or action. YAML 1.1 parses the key ``on`` as True."""
    loaded: dict[Any, Any] = yaml.safe_load((WORKFLOWS | ACTIONS)[name].read_text(encoding="utf-8"))
    return loaded


def workflow_steps(name: str) -> Iterator[dict[str, Any]]:
    """Yield every step of every job of a workflow, or of an action."""
    loaded = load_workflow(name)
    for job in loaded["jobs"].values() if name in WORKFLOWS else (loaded["runs"],):
        yield from job["steps"]


def documented_commands() -> set[tuple[str, ...]]:
    """Return every documented command: lines after a prompt, each part of a joined line, inline code."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = ["".join(match) for match in DOCUMENTED_COMMAND.findall(text)]
    return {split_command(part) for line in lines for part in re.split(r" && | {2,}", line)}


def split_command(command: str) -> tuple[str, ...]:
    """Split a command as a shell does. Inline code that is not a command gives an empty tuple."""
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return ()


def expand_variables(name: str, step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the command of a step for each value of its variables: matrix entries, input defaults or examples."""
    spelled = re.sub(r" \$\{\w+:\+[^}]*\}", "", step["run"].strip())  # empty, because the input is optional
    spelled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", spelled).replace("$RUNNER_TEMP/", "").replace("$SOURCES/", "")
    values = {key: variable_values(name, str(value)) for key, value in step.get("env", {}).items()}
    for combination in itertools.product(*values.values()):
        command = spelled
        for key, value in zip(values, combination, strict=True):
            command = command.replace(f"${key}", value)
        yield split_command(command)


def variable_values(name: str, expression: str) -> list[str]:
    """Return the values of ``${{ matrix.KEY }}``, ``${{ inputs.KEY }}``, ``${{ github.ref_name }}`` or a constant.

    The sources of an action are the folder in which its documented commands run.
    """
    if expression == "${{ github.action_path }}/../../..":
        return ["."]
    if not expression.startswith("${{"):
        return [expression]
    kind, _, key = expression.strip("${} ").partition(".")
    if (kind, key) == ("github", "ref_name"):
        return [f"v{zharness.__version__}"]
    if kind == "inputs":
        loaded = load_workflow(name)
        given = (loaded[True]["workflow_call"] if name in WORKFLOWS else loaded)["inputs"][key]
        return (
            [given["default"] or documented_inputs().get(key, "")] if "default" in given else [documented_inputs()[key]]
        )
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in load_workflow(name)["jobs"].values()]
    return list(next(matrix[key] for matrix in matrices if key in matrix))


def documented_inputs() -> dict[str, str]:
    """Return the inputs that the documented caller passes to compare.yml."""
    text = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "compare.yml" in block)
    given: dict[str, str] = yaml.safe_load(block)["jobs"]["zharness"]["with"]
    return given


def tox_environments() -> set[str]:
    """Return every environment of tox.ini, with braces expanded."""
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini")
    names = [section.removeprefix("testenv:") for section in parser.sections() if section.startswith("testenv:")]
    found = {name for name in names if "{" not in name}
    for head, choices in (re.fullmatch(r"(\w+)\{(.*)\}", name).groups() for name in names if "{" in name):  # type: ignore[union-attr]
        found.update(head + choice for choice in choices.split(","))
    return found


@pytest.mark.parametrize("name", [*WORKFLOWS, *ACTIONS])
def test_a_workflow_runs_documented_commands(name: str) -> None:
    unknown = [
        step["run"]
        for step in workflow_steps(name)
        if "run" in step and not documented_commands() & set(expand_variables(name, step))
    ]
    assert not unknown, f"{name} has commands that no page has: {unknown}; document them or run documented ones"


def test_the_environments_of_tox_that_workflows_name_exist() -> None:
    named = {found[0] for path in WORKFLOWS.values() for found in ENVIRONMENT.finditer(path.read_text("utf-8"))}
    matrix = load_workflow("test.yml")["jobs"]["torch"]["strategy"]["matrix"]
    assert {"lint", "actionlint", "torch_newest", *matrix["torch"]} <= named
    assert set(matrix["torch"]) | {"lint", "actionlint", "torch_newest"} <= tox_environments()


def test_the_matrix_has_every_engine_on_every_torch_release() -> None:
    matrix = load_workflow("test.yml")["jobs"]["torch"]["strategy"]["matrix"]
    assert set(matrix["engine"]) == {"reference", "fsdp2", "ddp", "zero1"}
    with_deepspeed = {entry["torch"] for entry in matrix["include"] if entry["engine"] == "deepspeed"}
    (line,) = re.findall(r"^ *([\w,]+): deepspeed$", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    assert with_deepspeed == set(line.split(","))


@pytest.mark.parametrize("name", [ACTION, "compare.yml"])
def test_a_record_of_reach_of_another_version_is_not_restored(name: str) -> None:
    prefix = f"zharness-reach-{REACH_VERSION}-${{{{ inputs.engine }}}}-"
    (restored,) = (step["with"] for step in workflow_steps(name) if step.get("id") == "recorded")
    assert restored["key"].startswith(prefix)
    assert restored["restore-keys"].startswith(prefix)


def test_a_pull_request_without_a_record_does_not_wait_for_one() -> None:
    (recording,) = (step for step in workflow_steps(ACTION) if "--record-reach" in step.get("run", ""))
    assert recording["if"] == "github.event_name != 'pull_request'"
    (notice,) = (step for step in workflow_steps(ACTION) if "no record yet" in step.get("run", ""))
    without = "inputs.reach == '' && steps.recorded.outputs.cache-matched-key == ''"
    assert notice["if"] == f"github.event_name == 'pull_request' && {without}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_read_permission_only(name: str) -> None:
    jobs = load_workflow(name)["jobs"].values()
    assert load_workflow(name)["permissions"] == {"contents": "read"}
    writing = [job for job in jobs if "permissions" in job]
    assert [job["permissions"] for job in writing] == WRITING_JOBS.get(name, [])
    # A job that may publish runs no command and no file of the repository: only actions that are pinned to a commit.
    assert not [step for job in writing for step in job["steps"] if "run" in step or "checkout" in step["uses"]]


def test_a_release_is_published_as_it_was_checked_and_tried_and_by_no_token() -> None:
    jobs = load_workflow("release.yml")["jobs"]
    build, trial, publish = (jobs[name] for name in ("build", "trial", "publish"))
    lines = [step.get("run", step.get("uses", "")) for step in (*build["steps"], *trial["steps"])]
    order = ("python -m build", "scripts/check_release.py", "upload-artifact", "download-artifact", "try_wheel.py")
    positions = [next(at for at, line in enumerate(lines) if part in line) for part in order]
    assert positions == sorted(positions)
    # The trial runs code of other projects, which must neither reach the files that are published nor the build.
    assert not [line for line in lines[: len(build["steps"])] if "try_wheel.py" in line]
    assert "upload-artifact" not in str(trial)
    assert "PIP_EXTRA_INDEX_URL" not in str([load_workflow("release.yml").get("env"), build, publish])
    assert trial["needs"] == "build"
    assert (publish["needs"], publish["environment"]) == (["build", "trial"], "pypi")
    assert publish["steps"][-1]["with"] == {"attestations": True}
    assert not [path.name for path in WORKFLOWS.values() if "secrets." in path.read_text("utf-8")]


def test_the_site_has_every_minor_release_of_torch() -> None:
    environments = load_workflow("site.yml")["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    assert set(environments) == {
        name for name in tox_environments() if ENVIRONMENT.fullmatch(name) and "lint" not in name
    }
    minors = [int(name.removeprefix("torch2")) for name in environments if name != "torch_newest"]
    assert minors == list(range(4, max(minors) + 1))
    assert max(minors) >= Version(pinned_release("torch")).minor


def pinned_release(name: str) -> str:
    """Return the release of a package in constraints.txt."""
    (found,) = re.findall(rf"^{name}==(.*)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    return str(found)


def test_the_site_has_every_minor_and_the_last_five_releases_of_deepspeed() -> None:
    releases = load_workflow("site.yml")["jobs"]["deepspeed"]["strategy"]["matrix"]["release"]
    pinned = pinned_release("deepspeed")
    assert releases == sorted(releases, key=Version)
    assert releases[-1] == pinned
    assert [Version(release).micro for release in releases[-5:]] == list(
        range(Version(pinned).micro - 4, Version(pinned).micro + 1)
    )
    minors = [Version(release).minor for release in releases]
    assert set(minors) == set(range(min(minors), max(minors) + 1))


@pytest.mark.parametrize("name", [*WORKFLOWS, *ACTIONS])
def test_every_action_is_pinned_to_a_commit(name: str) -> None:
    used = [step["uses"] for step in workflow_steps(name) if "uses" in step]
    # What begins with $/ is an action of the workflow's own commit.
    loose = [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}|\$/\.github/actions/check", action)]
    assert not loose, loose


@pytest.mark.parametrize("name", [*WORKFLOWS, *ACTIONS])
def test_no_cache_key_contains_a_requirement(name: str) -> None:
    # A key with a comma is refused, and a requirement such as zharness[deepspeed,test] has one.
    keys = [step["with"].get("key", "") for step in workflow_steps(name) if "actions/cache" in step.get("uses", "")]
    assert not [key for key in keys if "inputs.requirement" in key]


def test_the_requirement_of_compare_has_no_default() -> None:
    # A default that is a bare name would install from an index, where another person may own the name.
    requirement = load_workflow("compare.yml")[True]["workflow_call"]["inputs"]["requirement"]
    assert requirement["required"] is True
    assert "default" not in requirement


def test_the_weekly_record_is_saved_before_steps_that_may_fail() -> None:
    lines = [
        step.get("run", step.get("uses", "")) for step in load_workflow("newest.yml")["jobs"]["deepspeed"]["steps"]
    ]
    recorded, saved, watched = (
        next(at for at, text in enumerate(lines) if part in text)
        for part in ("zharness check", "actions/cache/save", "zharness releases")
    )
    assert recorded < saved < watched


def test_every_reproduction_runs_each_week() -> None:
    assert any(step.get("run", "").startswith("zharness repro --all") for step in workflow_steps("newest.yml"))


def test_workflow_linters_pass() -> None:
    # actionlint has its own environment in tox.ini: its package downloads a program when it is built.
    linters = {"zizmor": ("--offline", "--no-progress", *map(str, ACTIONS.values())), "actionlint": ()}
    scripts = sysconfig.get_path("scripts")
    found = {name: shutil.which(name, path=scripts) or shutil.which(name) for name in linters}
    assert found["zizmor"], f"zizmor is not in {sys.prefix}; install the package's extra 'test'"
    for name, program in found.items():
        if program is not None:
            done = subprocess.run(
                [program, *linters[name], *map(str, WORKFLOWS.values())], capture_output=True, text=True, cwd=ROOT
            )
            assert done.returncode == 0, done.stdout + done.stderr
