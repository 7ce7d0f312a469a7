"""A cell that fails on pooled ranks runs again on fresh ranks, and a difference between the two fails the run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.parity import Mismatch, Part, Tier
from zharness.report.failures import render_failures
from zharness.run import PlannedCell, Record, Verdict
from zharness.run.expected_failures import ExpectedFailure, parse_expected_failures
from zharness.run.matching_failures import find_expected_failure
from zharness.run.observe_and_judge import Judgement, observe
from zharness.run.outcomes import outcome_name, records_exit_code
from zharness.run.rank_pool import name_pool, rank_pool
from zharness.run.record import parse_record
from zharness.run.runner import Runner
from zharness.world import GroupOutcome, Isolation, RankEnd, RankOutcome, RankTask

CELL = Cell("training.grads", "reference", 3, 2, "fp32", "mlp")
FIRST = Mismatch(0, Part.REDUCTION, "first.weight", (0, 1), 1, 4, 0, 1.0, 2.0, 0.0, 8388608, 3, 12)
CRASHED = "rank 1 raised: RuntimeError: the parameter has 7 gradients"
LEAK = ExpectedFailure(
    *("reference", "training.grads", "upstream#1", "because", "crash", ("RuntimeError",)),
    isolation="pooled",
    location="ours.toml:1",
)


def ended(verdict: Verdict, cause: str = "", divergence: Mismatch | None = None) -> Record:
    cause = divergence.describe() if divergence else cause
    return Record(CELL, 0, verdict, "1.0", "2.13.0", cause=cause, divergence=divergence)


class PreparedRunner(Runner):
    """A runner without servers that returns prepared records of pooled and of fresh ranks."""

    def __init__(self, pooled: Record, fresh: Record, *user_expected_failures: ExpectedFailure) -> None:
        self.seed, self.isolation, self.user_expected_failures = 0, Isolation.POOLED, user_expected_failures
        self.records = {Isolation.POOLED: pooled, Isolation.POOLED_AFTER_ERRORS: fresh, Isolation.FRESH: fresh}

    def _run_once(self, cell: Cell, blank_record: Record, options: Mapping[str, Any], isolation: Isolation) -> Record:
        return self.records[isolation]


def run(pooled: Record, fresh: Record, *user_expected_failures: ExpectedFailure) -> Record:
    return PreparedRunner(pooled, fresh, *user_expected_failures).run(PlannedCell(CELL))


@pytest.mark.parametrize(
    ("pooled", "fresh"),
    [
        (ended(Verdict.FAIL, divergence=FIRST), ended(Verdict.FAIL, divergence=replace(FIRST, parameter="last.bias"))),
        (ended(Verdict.FAIL, divergence=FIRST), ended(Verdict.FAIL, divergence=replace(FIRST, step=1))),
        (ended(Verdict.CRASH, CRASHED), ended(Verdict.CRASH, "rank 1 raised: KeyError: 'first.weight'")),
        (ended(Verdict.CRASH, CRASHED), ended(Verdict.HANG, "rank 1 did not finish")),
    ],
)
def test_a_cell_with_two_causes_is_reported_as_a_difference(pooled: Record, fresh: Record) -> None:
    record = run(pooled, fresh)
    assert (outcome_name(record), record.cause) == (fresh.verdict.value, fresh.cause)
    report = render_failures([record])
    assert f"POOLED {CELL.id}\n  {pooled.verdict.value} on ranks that earlier cells had used" in report
    assert pooled.cause in report


@pytest.mark.parametrize(
    ("pooled", "fresh"),
    [
        (ended(Verdict.FAIL, divergence=FIRST), ended(Verdict.FAIL, divergence=replace(FIRST, actual=3.0, wrong=1))),
        (ended(Verdict.CRASH, CRASHED), ended(Verdict.CRASH, CRASHED.replace("rank 1", "rank 0"))),
    ],
)
def test_other_numbers_of_one_cause_are_no_difference(pooled: Record, fresh: Record) -> None:
    assert run(pooled, fresh).pool_difference == ""


def test_a_cell_that_fails_on_pooled_ranks_alone_fails_the_run() -> None:
    record = run(ended(Verdict.CRASH, CRASHED), ended(Verdict.PASS))
    assert (outcome_name(record), record.is_expected, records_exit_code([record])) == ("leak", False, 1)
    assert "crash on ranks that earlier cells had used, pass on fresh ranks: " + CRASHED in render_failures([record])
    assert parse_record(json.dumps(record.as_json())).pool_difference == record.pool_difference


def test_a_law_about_the_state_of_the_process_runs_on_fresh_ranks_alone() -> None:
    """An engine that another cell has built in a pool has changed the process already."""
    runner = PreparedRunner(ended(Verdict.PASS), ended(Verdict.FAIL, divergence=FIRST))
    record = runner.run(PlannedCell(replace(CELL, law="training.caller_modes")))
    assert (outcome_name(record), record.pool_difference) == ("fail", "")
    assert runner.run(PlannedCell(CELL)).verdict is Verdict.PASS


def test_an_expected_failure_on_pooled_ranks_explains_the_difference() -> None:
    record = run(ended(Verdict.CRASH, CRASHED), ended(Verdict.PASS), LEAK)
    assert (outcome_name(record), records_exit_code([record])) == ("pass", 0)
    assert "expected: upstream#1" in record.notes[-1]
    other = run(ended(Verdict.CRASH, "rank 0 raised: KeyError: 0"), ended(Verdict.PASS), LEAK)
    assert outcome_name(other) == "leak", "another failure is not explained"
    lasting = run(ended(Verdict.CRASH, CRASHED), ended(Verdict.CRASH, CRASHED), LEAK)
    assert (outcome_name(lasting), lasting.expected_failure) == ("crash", ""), "it explains no failure on fresh ranks"
    assert find_expected_failure(CELL, "1.0", (LEAK,)) is not LEAK


def test_only_pooled_ranks_can_be_named_by_an_expected_failure() -> None:
    entry = (
        '[[expected_failure]]\nlaw = "training.grads"\nupstream = "x"\nreason = "y"\nverdict = "fail"\n'
        'signatures = ["z"]\nisolation = "{}"\n'
    )
    (parsed,) = parse_expected_failures(entry.format("pooled"), "ours.toml", "reference")
    assert parsed.isolation == "pooled"
    with pytest.raises(UsageError, match=r"unknown isolation .*'fresh'; allowed: pooled"):
        parse_expected_failures(entry.format("fresh"), "ours.toml", "reference")


class RecordingServer:
    """A rank server that runs nothing and remembers the isolation of each task."""

    def __init__(self, value: object, scratch_dir: Path) -> None:
        self.scratch_dir, self.isolations = scratch_dir, list[Isolation]()
        self.outcome = GroupOutcome((RankOutcome(0, RankEnd.RETURNED, 0, payload=pickle.dumps(value)),), 0.0)

    def submit(self, task: RankTask) -> GroupOutcome:
        self.isolations.append(task.isolation)
        return self.outcome


def test_the_judge_of_a_second_run_is_fresh_too(tmp_path: Path) -> None:
    mismatched = Judgement(1, Tier.EXACT, 1.0, 0.0, FIRST)
    ranks, judges = RecordingServer(None, tmp_path), RecordingServer(mismatched, tmp_path)
    runner = object.__new__(Runner)
    runner.__dict__.update(
        seed=0, timeout=1.0, isolation=Isolation.POOLED, user_expected_failures=(), _free_evidence_dirs=[],
        _pools={}, _observe=observe,
        _servers={"reference": ranks}, _judge_server=judges,
        _claims={("reference", 3): engines.capabilities("reference", 3)},
    )  # fmt: skip
    runner.run(PlannedCell(CELL))
    assert ranks.isolations == judges.isolations == [Isolation.POOLED, Isolation.FRESH]


def test_a_cell_that_has_to_crash_leaves_the_ranks_of_its_pool_to_other_cells() -> None:
    crash = replace(LEAK, isolation="")
    crashed = ended(Verdict.CRASH, CRASHED)
    record = run(ended(Verdict.PASS), crashed, crash)
    assert (record.verdict, record.pool_difference) == (Verdict.CRASH, "")
    for on_pooled_ranks in (LEAK, replace(crash, engine_variants=("tiny_buckets",))):
        assert run(ended(Verdict.PASS), crashed, on_pooled_ranks).verdict is Verdict.PASS
    assert name_pool(CELL, Isolation.POOLED_AFTER_ERRORS) != name_pool(CELL, Isolation.POOLED) == rank_pool(CELL).name


def test_a_cell_that_does_not_crash_as_expected_runs_again_on_fresh_ranks() -> None:
    """An earlier cell that raised may have left something in the process."""
    runner = PreparedRunner(ended(Verdict.PASS), ended(Verdict.PASS), replace(LEAK, isolation=""))
    runner.records[Isolation.POOLED_AFTER_ERRORS] = ended(Verdict.CRASH, "rank 0 raised: KeyError: 0")
    record = runner.run(PlannedCell(CELL))
    assert (record.verdict, bool(record.stale_reason)) == (Verdict.PASS, True)
    assert record.pool_difference == "", "what an error leaves behind says nothing about the engine"


@pytest.mark.parametrize(
    ("verdict", "signature", "isolation"),
    [
        ("crash", "RuntimeError: the mesh", Isolation.POOLED_AFTER_ERRORS),
        ("crash", "was ended by a signal: SIGABRT", Isolation.FRESH),
        ("hang", "did not finish", Isolation.FRESH),
        ("crash", "RuntimeError: sizes differ in all_gather", Isolation.FRESH),
        ("crash", "RuntimeError: sizes differ in all_gather_into_tensor", Isolation.FRESH),
        ("crash", "Connection reset in broadcast (", Isolation.FRESH),
        ("crash", "waits in barrier", Isolation.FRESH),
        ("crash", "TypeError in reduced_grads", Isolation.POOLED_AFTER_ERRORS),
        ("fail", "the engine changed requires_grad of 'bias'", Isolation.POOLED_AFTER_ERRORS),
        ("fail", "first.weight", Isolation.POOLED),
    ],
)
def test_cells_that_have_to_raise_share_ranks_and_those_that_end_them_do_not(
    verdict: str, signature: str, isolation: Isolation
) -> None:
    entry = replace(LEAK, isolation="", verdict=verdict, signatures=(signature,))
    runner = PreparedRunner(ended(Verdict.PASS), ended(Verdict.PASS), entry)
    assert runner._choose_isolation(ended(Verdict.PASS)) is isolation
