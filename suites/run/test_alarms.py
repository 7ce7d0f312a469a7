"""Alarms of the soak: cells that gave one, with the seed that showed it, and known failures that resemble one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from zharness.cell import Cell
from zharness.engines.warm_up import build_warm_up_environment
from zharness.kill_matrix.clean_record import make_clean_record
from zharness.run import PlannedCell, Record, Runner, Verdict
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.matching_failures import list_similar_entries

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


OPTION = ExpectedFailure(
    *("ddp", "checkpointing.exception", "ours#1", "because", "fail", ("not reduced",)),
    engine_variants=("static_graph",),
)
LAW = replace(OPTION, check="training.*", engine_variants=(), world_sizes=(4,))


@pytest.mark.parametrize(
    ("case", "similar"),
    [
        ("training.grads[ddp{small_buckets}-zero0-w2-fp32-mlp]", [LAW]),
        ("training.grads[ddp{small_buckets+static_graph}-zero0-w2-fp32-mlp]", [OPTION, LAW]),
        ("training.grads[ddp{static_graph}-zero0-w4-fp32-mlp]", [OPTION]),  # LAW covers it
        ("backward.outputs[ddp{small_buckets}-zero0-w2-fp32-blocks]", []),
        ("training.grads[fsdp2{one_group}-zero2-w2-fp32-mlp]", []),
    ],
)
def test_an_alarm_names_known_failures_with_its_signature_and_its_option_or_law(
    case: str, similar: list[ExpectedFailure]
) -> None:
    def find(cause: str) -> list[ExpectedFailure]:
        return list_similar_entries(Cell.parse(case), "2.13.0", "fail", cause, "", (OPTION, LAW))

    assert [entry for entry in find("alone, not reduced") if entry in (OPTION, LAW)] == similar
    assert find("another cause") == []


def test_an_alarm_that_resembles_a_known_failure_stays_an_alarm() -> None:
    cell = Cell.parse("checkpointing.block[ddp{static_graph}-zero0-w2-fp32-blocks-reentrant]")
    record = Record(cell, 0, Verdict.FAIL, "2.13.0", "2.13.0", cause="it is the gradient of rank 0 alone, not reduced")
    found = make_clean_record([record])
    assert found.false_alarms == (record,)
    assert "  like zharness/expected_failures/ddp.toml:" in found.describe()
