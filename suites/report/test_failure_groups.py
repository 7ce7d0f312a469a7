"""Failures with one cause are one group, whatever cells show it, and the smallest cell of a group represents it."""

from __future__ import annotations

from dataclasses import replace

from zharness.cell import Cell
from zharness.parity import Mismatch, Part
from zharness.report.failure_groups import group_failures
from zharness.report.failures import render_failures
from zharness.run import Record, Verdict

CELL = Cell("training.grads", "deepspeed==0.18.8", 1, 2, "fp32", "mlp")
MISMATCH = Mismatch(0, Part.REDUCTION, "first.weight", (0, 1), 1, 4, 0, 1.0, 2.0, 0.0, 8388608, 3, 12)
REDUCED_TWICE = "rank {} raised: AssertionError: The parameter {} has already been reduced."
REFUSED = (
    "rank 0 raised: EngineRefusal: DeepSpeed does not accept it (AssertionError: start {}): {{'zero': {{'stage': {}}}}}"
)


def crashed(cause: str, **cell: object) -> Record:
    return Record(replace(CELL, **cell), 0, Verdict.CRASH, "0.18.8", "2.13.0", cause=cause)  # type: ignore[arg-type]


def wrong(hint: str, **cell: object) -> Record:
    mismatch = replace(MISMATCH, hint=hint)
    return replace(crashed(mismatch.describe(), **cell), verdict=Verdict.FAIL, divergence=mismatch)


def test_ranks_numbers_names_and_configurations_do_not_make_another_cause() -> None:
    records = [
        crashed(REDUCED_TWICE.format(1, "last.bias"), stage=2),
        crashed(REDUCED_TWICE.format(0, "blocks.0.norm.weight"), law="training.trajectory"),
        crashed(REFUSED.format(82, 1)),
        crashed(REFUSED.format(7, 2)),
        crashed("rank 0 raised: KeyError: 0"),
    ]
    assert [len(group) for group in group_failures(records)] == [2, 2, 1]


def test_a_wrong_number_is_grouped_by_its_hint_and_without_one_by_its_law() -> None:
    unreduced = [wrong(f"it is the gradient of rank {rank} alone", law=law) for rank, law in enumerate(("a.b", "c.d"))]
    programs = [wrong(f"lost; at the end of '{steps}'") for steps in ("f b s", "f b z b")]
    bare = [wrong("", law="a.b"), wrong("only 3 of 12 elements are wrong", law="a.b"), wrong("", law="c.d")]
    assert [len(group) for group in group_failures([*unreduced, *programs, *bare])] == [2, 2, 2, 1]


def test_another_factor_is_another_group_and_another_rounding_of_it_is_not() -> None:
    factors = ["2", "2.0000001", "0.5", "-0.5", "1.333333", "1.333334", "1e-07"]
    hints = [f"it is {factor} x the right gradient" for factor in factors]
    records = [wrong(hint, law=f"a.law{number}") for number, hint in enumerate(hints)]
    assert [len(group) for group in group_failures(records)] == [2, 2, 1, 1, 1]
    later = [
        wrong(f"it is {factor} x the right gradient after step {step}") for factor, step in ((2, 1), (2, 7), (4, 1))
    ]
    assert [len(group) for group in group_failures(later)] == [2, 1]


def test_a_text_between_two_configurations_tells_causes_apart() -> None:
    text = "rank 0 raised: {{'zero': {{'stage': {}}}}} {} {{'bf16': {{}}}}"
    records = [crashed(text.format(stage, cause)) for cause in ("lacks a key", "hangs with") for stage in (1, 2, 3)]
    assert [len(group) for group in group_failures(records)] == [3, 3]


def test_another_outcome_is_another_group() -> None:
    excused, hung = crashed("rank 0 did not finish"), replace(crashed("rank 0 did not finish"), verdict=Verdict.HANG)
    assert len(group_failures([excused, hung])) == 2


def test_a_large_group_is_its_size_and_its_smallest_cell() -> None:
    cause = REDUCED_TWICE.format(0, "last.bias")
    others = [
        crashed(cause, stage=stage, model="transformer", world_size=size) for stage in range(3) for size in (1, 4)
    ]
    smallest = crashed(cause, world_size=1)
    text = render_failures([*others, smallest])
    assert text.startswith(f"CRASH 7 cells with one cause, the smallest: {smallest.cell.id}")
    assert "7 of training; stages 0, 1, 2" in text
    assert text.count("again:") == 1
    assert f"again: {smallest.command}" in text


def test_a_small_group_lists_every_cell_with_its_command() -> None:
    records = [crashed("rank 0 raised: KeyError: 0", stage=stage) for stage in (3, 1)]
    lines = render_failures(records).splitlines()
    assert lines[:2] == [f"CRASH {record.cell.id}" for record in reversed(records)]
    assert [line.strip() for line in lines[-2:]] == [f"again: {record.command}" for record in reversed(records)]


def test_one_line_names_all_laws_or_models_that_did_not_run_for_one_reason() -> None:
    laws = [f"pipeline.{name}" for name in "abcdefghi"]
    records = [
        *(refuse(f"{law} calls train_batch", law=law) for law in laws),
        *(refuse(f"the model {model} has no plan", model=model) for model in ("conv", "conv", "fused")),
        refuse("not claimed"),
    ]
    assert render_failures(records).split("\n\n") == [
        "UNSUPPORTED 9 cells: pipeline.a (also pipeline.b, pipeline.c, pipeline.d, pipeline.e, pipeline.f, pipeline.g "
        "and 2 more) calls train_batch",
        "UNSUPPORTED 3 cells: the model conv (also fused) has no plan",
        "UNSUPPORTED 1 cell: not claimed",
    ]


def refuse(reason: str, **cell: object) -> Record:
    return replace(crashed(reason, **cell), verdict=Verdict.UNSUPPORTED)
