"""What ranks record of the functions that a cell reaches: pooled ranks measure one cell after the other."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from zharness.cell import Cell
from zharness.run import reach
from zharness.run.reach import get_measurement, observe_with_reach, read_reach, write_reach
from zharness.run.record import Record, Verdict

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
    write_reach(written, [Record(cell, 0, Verdict.PASS, "0", "2") for cell in cells], tmp_path / "reach.jsonl")
    recorded = read_reach(tmp_path / "reach.jsonl")
    step, clip = "pooled_toys/engine.py:step", "pooled_toys/engine.py:clip"
    assert [recorded[cell.id].functions for cell in cells] == [{step, f"{step} > if clips", clip}, {step}]
