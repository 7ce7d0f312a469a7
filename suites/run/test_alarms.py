"""Cells that gave a false alarm, or whose known bug was not recognised, run with the seed that showed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zharness.cell import Cell
from zharness.engines.warm_up import build_warm_up_environment
from zharness.run import PlannedCell, Runner, Verdict

CELLS = {
    # Three ranks are summed in another order before DDP has laid its buckets out anew.
    "state.several_saves[ddp{gradients_in_buckets}-zero0-w3-fp32-experts-before_any_step]": (71002, Verdict.PASS),
    # Rank 0's own gradient is zero, so that its copy, unlike that of rank 1, is what the last backward alone gives.
    "double_backward.retained_same_loss[ddp{find_unused_parameters}-zero0-w2-fp32-blocks]": (70001, Verdict.FAIL),
    # The forward uses old matrices beside new vectors, which FSDP2 ignores.
    "training.forward_alone[fsdp2{vectors_ignored}-zero2-w1-fp32-mlp-no_grad]": (70003, Verdict.FAIL),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    engines = {Cell.parse(case).engine for case in CELLS}
    with Runner({name: build_warm_up_environment(name) for name in engines}) as started:
        yield started


@pytest.mark.parametrize(("case", "seed", "verdict"), [(case, *rest) for case, rest in CELLS.items()], ids=CELLS)
def test_a_cell_that_gave_an_alarm_is_explained(runner: Runner, case: str, seed: int, verdict: Verdict) -> None:
    runner.seed = seed
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.is_expected, record.cause
    assert record.verdict is verdict, record.cause
