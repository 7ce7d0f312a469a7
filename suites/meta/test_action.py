"""The action check, in jobs of a small engine's repository: each `run:` step runs here, as GitHub would run it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from suites.meta.action_runner import ACTION, Runner, fill
from suites.meta.documents import ROOT
from suites.meta.test_workflows import load_workflow, workflow_steps
from suites.run.test_changed import ENGINE, commit_all
from zharness.run.reach import REACH_VERSION
from zharness.toml_text import parse_toml

INPUTS = {"engine": "toys.engine:Engine", "check": "training.grads", "depth": "1", "python-version": ""}
PIP = '#!/bin/bash\nprintf "%s\\n" "$@" >"$PIP_CALL"\n'  # what is installed here is what is tested
DOUBLED = ENGINE.replace("    return grads\n", "    return {name: 2 * grad for name, grad in grads.items()}\n")

EXCUSE = """\
engine = "toys.engine:Engine"

[[expected_failure]]
law = "training.grads"
upstream = "toys#1"
reason = "gradients are a multiple of the right ones"
verdict = "fail"
signatures = ["step 0"]
"""
# Inputs of the action that decide which cells a run of everything records.
RECORDED_BY = {"engine": "ddp", "check": "training.grads", "depth": "1", "python-version": "3.12", "laws": "1.0"}


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
    assert [key for _, key in runner.cache] == [
        f"zharness-reach-{REACH_VERSION}-{INPUTS['engine']}-Linux--1-training.grads--2"
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


def test_a_broken_law_keeps_the_record_that_a_job_with_every_input_reads(runner: Runner, tmp_path: Path) -> None:
    checkout = runner.workspace
    runner.workspace = tmp_path  # a checkout below the workspace, as actions/checkout with a path has it
    inputs = {**INPUTS, "path": checkout.name, "laws": "1.0", "excuses": "ci/excuses.toml"}
    (checkout / "ci").mkdir()
    (checkout / "ci" / "excuses.toml").touch()
    write_engine(checkout, DOUBLED)
    assert runner.run_job("schedule", 1, inputs) == 1, "\n".join(runner.ran)
    assert "again: zharness check 'training.grads[" in runner.summary.read_text(encoding="utf-8")
    assert {path.name for path in runner.artifacts.iterdir()} >= {"whole.jsonl", "whole.html"}
    (record,) = runner.cache.values()

    (checkout / "ci" / "reach.jsonl").write_bytes(record)
    write_engine(checkout, DOUBLED.replace("2 * grad", "3 * grad"))
    (checkout / "ci" / "excuses.toml").write_text(EXCUSE, encoding="utf-8")
    commit_all(checkout)  # since HEAD^1 no function has changed
    runner.cache.clear()
    code = runner.run_job("pull_request", 2, {**inputs, "base": "HEAD~2", "reach": "ci/reach.jsonl"})
    assert code == 0, "\n".join(runner.ran)
    assert "functions and branches changed since HEAD~2: 1 (toys/engine.py:correct)" in runner.summary.read_text(
        "utf-8"
    )
    records = map(json.loads, (runner.artifacts / "changed.jsonl").read_text(encoding="utf-8").splitlines())
    assert {(record["verdict"], record["excuse"]) for record in records} == {("fail", "toys#1")}


def test_a_run_that_records_nothing_fails_by_its_own_exit_code(runner: Runner) -> None:
    assert runner.run_job("schedule", 1, {**INPUTS, "check": "no.such_law"}) == 2, "\n".join(runner.ran)
    assert runner.ran[-1].startswith("warning: actions/cache/save saved nothing")
    assert not runner.cache


def find_cache_steps() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the steps of the action that save and restore the record."""
    steps = [step for step in workflow_steps("check") if "actions/cache" in step.get("uses", "")]
    saving, restoring = sorted(steps, key=lambda step: "cache/restore" in step["uses"])
    return saving, restoring


def save_record(runner: Runner, **inputs: str) -> None:
    """Save a record as a scheduled job with ``inputs`` does, and remove the file."""
    saving, _ = find_cache_steps()
    names = {**runner.name_values("schedule", 1), **name_inputs(inputs)}
    runner.temporary.mkdir(exist_ok=True)
    record = Path(fill(saving["with"]["path"], names))
    record.write_text("recorded", encoding="utf-8")
    runner.run_step(saving, names)
    record.unlink()


def name_inputs(inputs: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the action's inputs by the names that they have in expressions."""
    return {
        f"inputs.{name}": inputs.get(name, given["default"]) for name, given in load_workflow("check")["inputs"].items()
    }


def restore_record(runner: Runner, step: dict[str, Any]) -> bool:
    """Return whether ``step`` finds a record in a later job, a pull request's, with the default inputs."""
    names = {**runner.name_values("pull_request", 2), **name_inputs({})}
    runner.run_step(step, names)
    return bool(names.get("steps.recorded.outputs.cache-matched-key"))


@pytest.mark.parametrize("name", RECORDED_BY)
def test_a_job_does_not_read_the_record_of_one_with_other_cells(runner: Runner, name: str) -> None:
    _, restoring = find_cache_steps()
    save_record(runner, **{name: RECORDED_BY[name]})
    assert not restore_record(runner, restoring)
    save_record(runner)
    assert restore_record(runner, restoring)


def test_compare_restores_the_record_that_changed_has_saved(runner: Runner) -> None:
    saving, _ = find_cache_steps()
    (restoring,) = (step for step in workflow_steps("compare.yml") if step.get("id") == "recorded")
    assert restoring["with"]["path"] == saving["with"]["path"]
    save_record(runner, check="training.grads")
    assert not restore_record(runner, restoring), "the record of some laws alone"
    for laws in ("", "1.0"):
        runner.cache.clear()
        save_record(runner, laws=laws)
        assert restore_record(runner, restoring), laws
    (comparing,) = (step["run"] for step in workflow_steps("compare.yml") if "--reach" in step.get("run", ""))
    assert '--reach "$RUNNER_TEMP/reach.jsonl"' in comparing


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
