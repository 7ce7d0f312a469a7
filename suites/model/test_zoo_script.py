"""The script of the zoo runs again what was not run, and keeps the squares of the table that it did not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from scripts import zoo
from suites.model.short_run import find_difference, train_and_record
from zharness.cell import Cell
from zharness.run import Record, Verdict
from zharness.run.model_check import ModelCheckRequest

PATH = "suites.model.tiny:perceptron"


def test_a_model_is_run_again_for_other_laws_and_stages(tmp_path: Path) -> None:
    results = zoo.ResultFile(tmp_path / "zoo.jsonl")
    two = ModelCheckRequest(PATH, engine="deepspeed", stages=(1, 2), only=("training.kernels",))
    cell = Cell("training.kernels", "deepspeed", 1, 2, "fp32", PATH)
    results.add(two, [Record(cell, 0, Verdict.PASS, "1", "2")])
    assert results.has(two)
    assert results.has(ModelCheckRequest(PATH, engine="deepspeed", stages=(2,), only=("training.kernels",)))
    assert not results.has(ModelCheckRequest(PATH, engine="deepspeed", stages=(1, 2, 3), only=("training.kernels",)))
    assert not results.has(ModelCheckRequest(PATH, engine="deepspeed", stages=(1, 2)))
    assert not results.has(ModelCheckRequest(PATH, engine="ddp", stages=(1,), only=("training.kernels",)))
    results.add(ModelCheckRequest(PATH, engine="deepspeed", stages=(3,)), [], "REFUSED: too new")
    assert results.has(ModelCheckRequest(PATH, engine="deepspeed", stages=(3,), only=("training.grads",)))
    table = zoo.render_table(results.load(), results.list_requests(), {("perceptron", "ddp 0"): "3"})
    (row,) = [line for line in table.splitlines() if line.startswith("| perceptron")]
    squares = dict(zip(zoo.COLUMNS, [cell.strip() for cell in row.split("|")[2:-1]], strict=True))
    assert squares["deepspeed", 1] == "1"
    assert squares["deepspeed", 3] == "refused"
    assert squares["ddp", 0] == "3", "a square without a record keeps its text"
    assert squares["fsdp2", 3] == "not run"


def test_the_table_of_the_page_can_be_read_back() -> None:
    squares = zoo.read_table("zoo")
    assert {name for name, _ in squares} == set(zoo.NAMES)
    assert {column for _, column in squares} == {f"{engine} {stage}" for engine, stage in zoo.COLUMNS}


@pytest.mark.world_size(2)
def test_a_short_run_tells_a_broken_engine_from_the_right_one(shared_tmp_path: Path, world_size: int) -> None:
    runs = {"first": "reference", "second": "reference", "broken": "zharness.mutants:clips_to_half"}
    for folder, engine in runs.items():
        (shared_tmp_path / folder).mkdir(exist_ok=True)
        train_and_record(Cell("training.grads", engine, 0, world_size, "fp32", PATH), str(shared_tmp_path / folder))
    dist.barrier()
    first = shared_tmp_path / "first"
    assert not find_difference(shared_tmp_path / "second", first, world_size)
    assert find_difference(shared_tmp_path / "broken", first, world_size) == "weight 0.weight after step 0"
