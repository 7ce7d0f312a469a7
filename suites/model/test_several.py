"""Several models, engines and configurations are checked in one run, and held against a recorded one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from suites.meta.documents import ROOT
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.report.model_outputs import ModelOutputs
from zharness.run import Record, Verdict
from zharness.run.model_matrix import ModelMatrix
from zharness.workload.user_model import list_factories

SEVERAL = "suites.model.several"
CELL = Cell("training.grads", "ddp", 0, 2, "fp32", f"{SEVERAL}:small")


def test_a_pattern_names_the_factories_of_a_module() -> None:
    assert list_factories(f"{SEVERAL}:*") == [f"{SEVERAL}:{name}" for name in ("small", "large", "unbuildable")]
    assert list_factories(f"{SEVERAL}:l*") == [f"{SEVERAL}:large"]
    assert list_factories("other.module:name") == ["other.module:name"]
    with pytest.raises(
        UsageError, match=r"unknown factory of suites\.model\.several 'x\*'; allowed: small, large, unb"
    ):
        list_factories(f"{SEVERAL}:x*")


def test_every_combination_is_requested_engine_by_engine() -> None:
    matrix = ModelMatrix((f"{SEVERAL}:small", f"{SEVERAL}:*"), ("ddp", "fsdp2"), ("a.json", "b.json"))
    found = [(request.engine, request.model.partition(":")[2], request.config) for request in matrix.expand()]
    names = ("small", "large", "unbuildable")
    assert found == [(e, m, c) for e in ("ddp", "fsdp2") for m in names for c in ("a.json", "b.json")]


def test_a_repository_of_models_is_checked_in_one_run(tmp_path: Path) -> None:
    config, jsonl, summary = tmp_path / "plain.json", tmp_path / "run.jsonl", tmp_path / "summary.md"
    config.write_text(json.dumps({"gradient_clipping": 1.0}))
    arguments = ["--engine", "ddp", "--engine", "reference", "--stage", "0", "--only", "training.grads", "--jobs", "1"]
    arguments += ["--config", str(config), "--jsonl", str(jsonl)]
    done = subprocess.run(
        [sys.executable, "-m", "zharness", "model", f"{SEVERAL}:*", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GITHUB_STEP_SUMMARY": str(summary)},
    )
    assert done.returncode == 2, done.stdout + done.stderr
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [record["verdict"] for record in records] == ["pass"] * 4
    assert "ddp, stage 0" in done.stdout
    assert "reference, stage 0" in done.stdout
    assert f"{SEVERAL}:large" in summary.read_text()
    refusal = f"REFUSED {SEVERAL}:unbuildable on ddp with {config}: "
    assert refusal in done.stdout
    assert "raised FileNotFoundError: no weights.pt" in done.stdout
    assert refusal in summary.read_text()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_prints_the_table_so_far(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "zharness", "model", "suites.model.tiny:perceptron", "--engine", "ddp"]
    process = subprocess.Popen(
        [*command, "--jobs", "1", "--jsonl", path], cwd=ROOT, text=True, stdout=PIPE, stderr=PIPE
    )
    partial = tmp_path / "run.jsonl.partial"
    while process.poll() is None and not (partial.exists() and partial.read_text().count("\n")):
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert re.search(r"INTERRUPTED after \d+ cells?; 0 of 1 checks of a model came to their end", output), output
    assert "ddp " in output
    assert "zharness: interrupted" in errors
    assert "Traceback" not in errors
    assert path.read_text().count("\n") >= 1


def make_record(verdict: Verdict, cause: str = "") -> Record:
    """Return a record of CELL."""
    return Record(CELL, 0, verdict, "1", "2", cause=cause)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (make_record(Verdict.PASS), make_record(Verdict.PASS), 0),
        (make_record(Verdict.PASS), make_record(Verdict.FAIL, "wrong"), 1),
        (make_record(Verdict.FAIL, "wrong"), make_record(Verdict.FAIL, "wrong"), 0),
        (make_record(Verdict.FAIL, "wrong"), make_record(Verdict.FAIL, "other"), 1),
        (make_record(Verdict.PASS), make_record(Verdict.UNDETERMINED, "small"), 1),
        (make_record(Verdict.FAIL, "wrong"), make_record(Verdict.ERROR, "ours"), 3),
    ],
)
def test_a_run_is_held_against_a_recorded_one(tmp_path: Path, before: Record, after: Record, code: int) -> None:
    recorded = tmp_path / "recorded.jsonl"
    other_law = replace(before, cell=replace(CELL, law="training.sgd_step"))
    recorded.write_text("".join(json.dumps(record.as_json()) + "\n" for record in (before, other_law)))
    outputs = ModelOutputs(against=recorded)
    outputs.require_writable()
    recorded.write_text("")  # --jsonl may name the same file, which is then written
    assert outputs.report_models([after], 1.0, ()) == code


def test_without_a_recorded_run_a_failure_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert ModelOutputs().report_models([make_record(Verdict.FAIL, "wrong")], 1.0, ("NO PASS: why",)) == 1
    assert "NO PASS: why" in capsys.readouterr().out


def test_a_recorded_run_of_other_models_is_refused(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.jsonl"
    other = replace(make_record(Verdict.PASS), cell=replace(CELL, model=f"{SEVERAL}:large"))
    recorded.write_text(json.dumps(other.as_json()) + "\n")
    with pytest.raises(UsageError, match="they share none"):
        ModelOutputs(against=recorded).compare([make_record(Verdict.PASS)])
