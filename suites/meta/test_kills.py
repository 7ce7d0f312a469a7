"""The kill matrix and the clean record: their counts, their complaints, and how an interrupted run is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zharness.errors import UsageError
from zharness.kill_matrix import make_target_cell
from zharness.kill_matrix.clean_record import make_clean_record, upper_bound
from zharness.kill_matrix.command import KillOptions, Scope, plan_attempts
from zharness.kill_matrix.matrix import KillMatrix, list_complaints, render_fault_kinds_table
from zharness.kill_matrix.resume import load_finished_records
from zharness.laws import LAWS
from zharness.mutants import MUTANTS, Mutant, find_mutants
from zharness.parity import Mismatch
from zharness.run import Record, Verdict
from zharness.run.record import open_record_file


def make_record(mutant: Mutant, verdict: Verdict, number: int = 0) -> Record:
    target = mutant.targets[number]
    divergence = None
    if target.part is not None and verdict is Verdict.FAIL:
        name = target.parameter.replace("*", "w")
        divergence = Mismatch(0, target.part, name, (0,), None, 0, 0, 1.0, 2.0, 0.5, 9, 1, 1)
    return Record(make_target_cell(mutant, target), 0, verdict, "1", "2", divergence=divergence, cause=target.cause)


def make_matrix(*records: Record) -> KillMatrix:
    names = {record.cell.engine for record in records}
    mutants = tuple(mutant for mutant in MUTANTS.values() if mutant.engine in names)
    return KillMatrix(mutants, ("training.grads", "training.trajectory"), records)


NEVER, LATE = MUTANTS["never_reduces"], MUTANTS["wrong_epsilon"]


def test_a_mutant_that_no_law_kills_survives_and_the_exit_code_is_1() -> None:
    matrix = make_matrix(make_record(NEVER, Verdict.FAIL), make_record(LATE, Verdict.PASS))
    assert matrix.killers_by_mutant() == {"never_reduces": ("training.grads",), "wrong_epsilon": ()}
    assert matrix.survivors() == [LATE]
    assert matrix.sole_kills_by_law() == {"training.grads": ("never_reduces",), "training.trajectory": ()}
    assert matrix.exit_code() == 1
    assert make_matrix(make_record(NEVER, Verdict.FAIL)).exit_code() == 0


def test_a_mutant_that_survives_one_target_is_named_and_the_exit_code_is_1() -> None:
    mutant = MUTANTS["only_the_first_backward_counts"]
    verdicts = (Verdict.FAIL, Verdict.PASS, Verdict.ERROR)
    first, second, third = (make_record(mutant, verdict, number) for number, verdict in enumerate(verdicts))
    matrix = KillMatrix((mutant,), (first.cell.law,), (first, second))
    assert (matrix.survivors(), matrix.survived_targets(), matrix.exit_code()) == ([], [second], 1)
    assert f"{second.cell.id} is a target that the mutant survives" in list_complaints(matrix)
    assert replace(matrix, records=(first,)).exit_code() == 0
    assert not replace(matrix, records=(first, third)).survived_targets()


def test_the_scope_of_targets_runs_every_target_and_nothing_else() -> None:
    mutant = MUTANTS["drops_optimizer_options"]
    laws = [LAWS[name] for name in sorted(mutant.named_laws)]
    attempts = plan_attempts([mutant], laws, KillOptions(scope=Scope.TARGETS))
    planned = sorted(cell.cell.id for attempt in attempts for cell in attempt.cells)
    assert planned == sorted(make_target_cell(mutant, target).id for target in mutant.targets)
    assert len(planned) > len(laws)
    (first, *_) = plan_attempts([mutant], [LAWS["access.read_grad"], *laws], KillOptions())
    assert first.law in mutant.named_laws


def test_each_kind_of_fault_is_counted_with_its_least_and_its_median_number_of_killers() -> None:
    both = (make_record(NEVER, Verdict.FAIL), make_record(MUTANTS["leaves_out_the_last_rank"], Verdict.PASS))
    rows = render_fault_kinds_table(make_matrix(*both)).splitlines()[2:]
    assert [row.split()[-4:] for row in rows] == [["2", "1", "0", "0"]]
    (only,) = render_fault_kinds_table(make_matrix(both[0])).splitlines()[2:]
    assert only.startswith(NEVER.kind.value)
    assert only.split()[-4:] == ["1", "1", "1", "1"]


def test_an_error_of_the_harness_kills_no_mutant() -> None:
    matrix = make_matrix(make_record(NEVER, Verdict.ERROR))
    assert matrix.survivors() == [NEVER]
    assert matrix.exit_code() == 3


def test_a_first_divergence_is_right_if_it_names_the_part_and_the_parameter() -> None:
    right = make_record(MUTANTS["forgets_a_parameter"], Verdict.FAIL)
    assert right.divergence is not None
    wrong = replace(right, divergence=replace(right.divergence, parameter="second.weight"))
    assert make_matrix(right).check_named_divergences() == (1, [])
    killed_count, messages = make_matrix(wrong).check_named_divergences()
    assert killed_count == 1
    assert "in reduction of first.weight" in messages[0]


def test_a_killed_run_is_resumed_from_its_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    first, second = make_record(NEVER, Verdict.FAIL), make_record(LATE, Verdict.FAIL)
    with open_record_file(path) as file:
        file.add(first)
    partial = tmp_path / "kills.jsonl.partial"
    partial.write_text(json.dumps(second.as_json()) + "\n" + json.dumps(first.as_json())[:40])
    assert [record.cell for record in load_finished_records(path)] == [first.cell, second.cell]
    assert not partial.exists()
    assert [record.cell for record in load_finished_records(path)] == [first.cell, second.cell]


def test_a_file_without_records_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a record\n")
    with pytest.raises(UsageError, match="not a zharness record"):
        load_finished_records(path)
    assert path.read_text() == "not a record\n"


def test_a_pattern_that_matches_no_mutant_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown mutant 'nobody'"):
        find_mutants(("nobody",))


def test_each_law_on_a_model_of_the_workload_has_its_own_reason_to_be_kept() -> None:
    reasons = {name: law.kept_because for name, law in LAWS.items() if law.kept_because}
    assert sorted(reasons) == sorted(name for name, law in LAWS.items() if law.models)
    assert len(set(reasons.values())) == len(reasons)


def test_the_bound_without_a_false_alarm_is_the_rule_of_three() -> None:
    assert 2.99 < 10_000 * upper_bound(0, 10_000) < 3.0
    assert upper_bound(0, 0) == upper_bound(3, 3) == 1.0


def test_the_bound_of_one_event_in_twenty_is_the_tabulated_one() -> None:
    # Clopper and Pearson's one-sided limit for 1 of 20, from the F distribution: 0.216.
    assert round(upper_bound(1, 20), 3) == 0.216


def test_cells_at_tier_x_or_s_are_counted() -> None:
    passed = make_record(LATE, Verdict.PASS)
    tiers = [replace(passed, tier=tier) for tier in ("X", "S", "C", None)]
    assert make_clean_record([*tiers, replace(passed, tier="X", expected_failure="#1")]).bounded_count == 2


def test_an_expected_failure_is_neither_clean_nor_a_false_alarm() -> None:
    broken = make_record(NEVER, Verdict.FAIL)
    records = [
        make_record(LATE, Verdict.PASS),
        broken,
        replace(broken, expected_failure="#1"),
        make_record(LATE, Verdict.ERROR),
    ]
    found = make_clean_record(records)
    assert (found.judged_count, found.false_alarms, found.expected_failure_count, len(found.errors)) == (
        2,
        (broken,),
        1,
        1,
    )
    assert "1 false alarms in 2 clean cells" in found.describe()
