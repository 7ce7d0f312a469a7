"""What ranks record of the functions that a cell reaches: pooled ranks measure one cell after the other."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from suites.run.test_changed import ENGINE as PASSING_ENGINE
from suites.warm import programs
from suites.warm.programs import Program
from zharness.cell import Cell
from zharness.run import reach
from zharness.run.reach import (
    SAVE_INTERVAL,
    CellReach,
    ReachRecorder,
    get_measurement,
    name_in_record,
    observe_with_reach,
    open_reach_recorder,
    read_reach,
)
from zharness.run.record import Record, Verdict
from zharness.run.record_reader import read_cells

ENGINE = """\
def step(clips):
    if clips:
        return clip()
    return 1


def clip():
    return 2
"""


def test_cells_on_one_rank_share_a_measurement_and_not_what_they_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, written = tmp_path / "pooled_toys" / "engine.py", tmp_path / "written"
    source.parent.mkdir()
    written.mkdir()
    (source.parent / "__init__.py").touch()
    source.write_text(ENGINE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine: Any = importlib.import_module("pooled_toys.engine")
    monkeypatch.setattr(reach, "observe", lambda cell, *_: engine.step(cell.law == "training.clip_wide"))
    cells = [
        Cell(law, "pooled_toys.engine:make", 0, 2, "fp32", "mlp") for law in ("training.clip_wide", "training.grads")
    ]
    before = get_measurement.cache_info().currsize
    for cell in (*cells, *cells):
        observe_with_reach(str(written), cell, 0, "", engine, {})
    assert get_measurement.cache_info().currsize == before + 1
    with open_reach_recorder(written, tmp_path / "reach.jsonl", {}) as recorder:
        for cell in cells:
            recorder.add(Record(cell, 0, Verdict.PASS, "0", "2"))
    recorded = read_reach(tmp_path / "reach.jsonl")
    step, clip = "pooled_toys/engine.py:step", "pooled_toys/engine.py:clip"
    assert [recorded[cell.id].functions for cell in cells] == [{step, f"{step} > if clips", clip}, {step}]


def test_a_run_ended_by_sigterm_keeps_what_cells_reached_and_one_that_goes_on_adds_to_it(tmp_path: Path) -> None:
    (tmp_path / "kept_engine.py").write_text(PASSING_ENGINE, encoding="utf-8")
    engine = ("--engine", "kept_engine:Engine", "--stage", "0", "--model", "mlp", "--jobs", "1")
    check = ("-m", "zharness", "check", *engine, "--record-reach", "reach.jsonl")
    records, partial = tmp_path / "records.jsonl", tmp_path / "records.jsonl.partial"
    with (
        open(os.devnull, "wb") as devnull,
        Program([*check, "training", "--jsonl", str(records)], devnull, devnull, tmp_path, dict(os.environ)) as process,
    ):
        while process.poll() is None and not (partial.exists() and '"pass"' in partial.read_text("utf-8")):
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    first = read_reach(tmp_path / "reach.jsonl")
    finished = {name_in_record(cell) for cell in read_cells([records])}
    assert first
    assert set(first) <= finished
    go_on = (*check, "training.grads", "training.sgd_step", "--continue", "records.jsonl")
    done = programs.run(*go_on, "--jsonl", "rest.jsonl", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    second = read_reach(tmp_path / "reach.jsonl")
    assert {name: second[name] for name in first} == first
    laws = {Cell.parse(name).law for name in second}
    assert {"training.grads", "training.sgd_step"} <= laws
    assert not set(map(name_in_record, read_cells([tmp_path / "rest.jsonl"]))) & set(first)


def test_a_record_is_written_while_its_run_goes_on(tmp_path: Path) -> None:
    path, cell = tmp_path / "reach.jsonl", Cell("training.grads", "ddp", 0, 2, "fp32", "mlp")
    now = iter([0.0, SAVE_INTERVAL - 1, SAVE_INTERVAL, SAVE_INTERVAL])
    recorder = ReachRecorder(tmp_path, path, {cell.id: CellReach(frozenset({"f:a"}), 1.0)}, lambda: next(now))
    recorder.add(Record(cell, 0, Verdict.PASS, "0", "2"))
    assert not path.exists()
    recorder.add(Record(cell, 0, Verdict.PASS, "0", "2"))
    assert read_reach(path) == {cell.id: CellReach(frozenset({"f:a"}), 1.0)}


def test_a_record_has_the_verdict_and_the_seconds_of_the_last_run_of_a_cell(tmp_path: Path) -> None:
    path, cell = tmp_path / "reach.jsonl", Cell("training.grads", "ddp@/a", 0, 2, "fp32", "mlp")
    with open_reach_recorder(tmp_path, path, {name_in_record(cell): CellReach(frozenset({"f:a"}), 1.0)}) as recorder:
        (tmp_path / "1.json").write_text(json.dumps({"cell": cell.id, "lines": {}}), encoding="utf-8")
        recorder.add(Record(cell, 0, Verdict.FAIL, "0", "2", seconds=9.0, rank_cpu_seconds=4.0))
    assert read_reach(path) == {name_in_record(cell): CellReach(frozenset(), 2.0, Verdict.FAIL)}
    assert read_reach(path)[name_in_record(cell)].failed
    assert not list(tmp_path.glob("*.json"))
