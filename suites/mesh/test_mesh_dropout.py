"""Dropout on a mesh: FSDP2 repeats a mask on a CPU, and an engine that draws for each part of a sequence passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zharness.cell import Cell
from zharness.errors import HarnessFault
from zharness.law_kit.observed_collectives import find_operator
from zharness.run import PlannedCell, Runner, Verdict

DRAWS_FOR_EACH_PART = "zharness.mutants.mesh_dropout:DrawsForEachPart"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({"fsdp2": {}, DRAWS_FOR_EACH_PART: {}}) as started:
        yield started


@pytest.mark.parametrize(
    ("engine", "variant", "verdict"),
    [
        ("fsdp2", "", Verdict.PASS),  # gradients are right under masks that are not
        ("fsdp2", "-recomputed", Verdict.PASS),
        ("fsdp2", "-masks", Verdict.FAIL),
        (DRAWS_FOR_EACH_PART, "", Verdict.PASS),
        (DRAWS_FOR_EACH_PART, "-recomputed", Verdict.PASS),
        (DRAWS_FOR_EACH_PART, "-masks", Verdict.PASS),
    ],
)
def test_parts_of_a_sequence_have_masks_of_their_own_on_a_right_engine(
    runner: Runner, engine: str, variant: str, verdict: Verdict
) -> None:
    cell = Cell.parse(f"mesh.dropout[{engine}-zero2-w4.tp2-fp32-dropped_sequence{variant}]")
    record = runner.run(PlannedCell(cell))
    assert record.is_expected, record.cause
    assert record.verdict is verdict, record.cause


def test_a_collective_that_the_observer_does_not_know_is_an_error() -> None:
    assert find_operator("aten::add") is None
    assert find_operator("c10d::barrier") is None
    with pytest.raises(HarnessFault, match="does not know the operator c10d::new_collective"):
        find_operator("c10d::new_collective")
