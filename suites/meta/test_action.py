"""The action check, in jobs of a small engine's repository: each `run:` step runs here, as GitHub would run it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from suites.meta.action_runner import ACTION, Runner
from suites.meta.documents import ROOT
from suites.meta.test_workflows import load_workflow
from suites.run.test_changed import ENGINE, commit_all
from zharness.run.reach import REACH_VERSION
from zharness.toml_text import parse_toml

INPUTS = {"engine": "toys.engine:Engine", "check": "training.grads", "depth": "1", "python-version": ""}
PIP = '#!/bin/bash\nprintf "%s\\n" "$@" >"$PIP_CALL"\n'  # what is installed here is what is tested
DOUBLED = ENGINE.replace("    return grads\n", "    return {name: 2 * grad for name, grad in grads.items()}\n")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Return a machine with a checkout of an engine's repository in its workspace, and a pip that installs nothing."""
    workspace, programs = tmp_path / "engine", tmp_path / "programs"
    (workspace / "toys").mkdir(parents=True)
    programs.mkdir()
    (workspace / "toys" / "__init__.py").touch()
    (workspace / "zharness.toml").write_text('[check]\nmodel = ["mlp"]\n', encoding="utf-8")
    write_engine(workspace, ENGINE)
    (programs / "pip").write_text(PIP, encoding="utf-8")
    (programs / "pip").chmod(0o755)
    (programs / "zharness").write_text(f'#!/bin/bash\nexec {sys.executable} -m zharness "$@"\n', encoding="utf-8")
    (programs / "zharness").chmod(0o755)
    monkeypatch.setenv("PIP_CALL", str(tmp_path / "pip_call"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Runner(workspace, tmp_path, programs)


def write_engine(workspace: Path, source: str) -> None:
    """Commit ``source`` as the engine's only file."""
    (workspace / "toys" / "engine.py").write_text(source, encoding="utf-8")
    commit_all(workspace)


def test_a_nightly_run_records_what_a_pull_request_reads(runner: Runner, tmp_path: Path) -> None:
    def run_job(event: str, run_id: int, expected: int, **more: str) -> str:
        code = runner.run_job(event, run_id, {**INPUTS, **more})
        assert code == expected, "\n".join(runner.ran)
        return runner.summary.read_text(encoding="utf-8")

    assert run_job("pull_request", 1, 0) == "no record yet; the nightly run makes one\n"
    source, *_ = (tmp_path / "pip_call").read_text(encoding="utf-8").splitlines()[1].split("[")
    assert Path(source).resolve() == ROOT

    assert "| training.grads" in run_job("schedule", 2, 0)
    assert {path.name for path in runner.artifacts.iterdir()} == {"whole.jsonl", "whole.html"}
    assert [path.name for path in runner.cache.iterdir()] == [
        f"zharness-reach-{REACH_VERSION}-{INPUTS['engine']}-Linux-2"
    ]

    write_engine(runner.workspace, DOUBLED)
    summary = run_job("pull_request", 3, 1, requirement="zharness @ somewhere")
    assert (tmp_path / "pip_call").read_text(encoding="utf-8").splitlines() == ["install", "zharness @ somewhere"]
    assert "functions and branches changed since HEAD^1: 1 (toys/engine.py:correct)" in summary
    assert "again: zharness check 'training.grads[toys.engine:Engine@.-zero0-w2-fp32-mlp" in summary
    assert {path.name for path in runner.artifacts.iterdir()} >= {"changed.jsonl", "changed.html"}
    records = map(json.loads, (runner.artifacts / "changed.jsonl").read_text(encoding="utf-8").splitlines())
    # The model is that of the engine's zharness.toml.
    assert {(record["verdict"], record["model"]) for record in records} == {("fail", "mlp")}


def test_the_steps_of_a_job_that_cannot_install_are_skipped_but_the_upload(runner: Runner) -> None:
    (runner.programs / "pip").write_text("#!/bin/bash\nexit 3\n", encoding="utf-8")
    assert runner.run_job("schedule", 1, INPUTS) == 3
    assert len(runner.ran) == 1
    assert not list(runner.artifacts.iterdir())


def test_the_action_installs_extras_of_this_package_and_reads_records_of_this_version() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")["project"]
    assert set(action["inputs"]["extras"]["default"].split(",")) <= set(project["optional-dependencies"])
    keys = [step["with"]["key"] for step in action["runs"]["steps"] if "actions/cache" in step.get("uses", "")]
    assert len(keys) == 2
    assert all(key.startswith(f"zharness-reach-{REACH_VERSION}-${{{{ inputs.engine }}}}-") for key in keys)


def test_the_reusable_workflow_passes_inputs_that_the_action_has() -> None:
    steps = load_workflow("changed.yml")["jobs"]["changed"]["steps"]
    (used,) = (step for step in steps if step["uses"].startswith("$/"))
    assert ROOT / used["uses"].removeprefix("$/") == ACTION
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    assert set(used["with"]) <= set(action["inputs"])
    for name, value in used["with"].items():
        assert value == f"${{{{ inputs.{name} }}}}"
        assert (
            load_workflow("changed.yml")[True]["workflow_call"]["inputs"][name]["default"]
            == action["inputs"][name]["default"]
        )


def test_the_documentation_has_the_inputs_of_the_action_and_of_its_workflow() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8").partition("### In an engine's own CI")[2]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} == set(action["inputs"])
    (sentence,) = re.findall(r"^`changed\.yml` has (.*?)\.$", page, re.MULTILINE)
    inputs = load_workflow("changed.yml")[True]["workflow_call"]["inputs"]
    assert re.findall(r"`([\w-]+)`", sentence) == list(inputs)
