"""What an engine does that is no wrong number is named as its own fault, never as one of the harness."""

from collections.abc import Iterator

import pytest

from zharness.case import Case
from zharness.run import Record, Request, Runner, Verdict, plan
from zharness.run.runner import surroundings

BROKEN, MUTANTS = "suites.meta.broken:", "zharness.mutants:"

FAULTS = {
    "raises_in_backward": (Verdict.CRASH, "IndexError: list index out of range"),
    "dies_in_backward": (Verdict.CRASH, "rank 1 was ended by a signal: SIGSEGV"),
    "hangs_in_backward": (Verdict.HANG, "did not finish in time"),
    "wrong_names": (Verdict.FAIL, "full_grads has the wrong names"),
    "returns_nothing": (Verdict.FAIL, "grads: the engine returned a NoneType, expected a dictionary"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    names = [*(BROKEN + fault for fault in FAULTS), BROKEN + "replaces_linear", MUTANTS + "steps_late"]
    with Runner({name: surroundings(name) for name in names}, timeout=10.0) as started:
        yield started


def run_one(runner: Runner, case: Case) -> Record:
    (planned,) = plan(Request(patterns=(case.id,)), runner.claims)
    assert not planned.unsupported, planned.unsupported
    return runner.run(planned)


@pytest.mark.parametrize(("fault", "verdict", "cause"), [(name, *rest) for name, rest in FAULTS.items()], ids=FAULTS)
def test_a_fault_of_the_engine_is_named_and_is_no_error_of_the_harness(
    runner: Runner, fault: str, verdict: Verdict, cause: str
) -> None:
    record = run_one(runner, Case("training.grads", BROKEN + fault, 0, 2, "fp32", "mlp"))
    assert record.verdict is verdict, record.cause
    assert cause in record.cause


def test_a_mutant_passes_a_law_that_it_does_not_break(runner: Runner) -> None:
    record = run_one(runner, Case("training.grads", MUTANTS + "steps_late", 0, 2, "fp32", "mlp"))
    assert record.verdict is Verdict.PASS, record.cause


def test_an_engine_that_replaces_a_function_of_torch_is_told_and_the_baseline_knows_nothing_of_it(
    runner: Runner,
) -> None:
    record = run_one(runner, Case("training.grads", BROKEN + "replaces_linear", 0, 2, "fp32", "mlp"))
    assert record.verdict is Verdict.PASS, record.cause
    (note,) = record.notes
    assert "torch.nn.functional.linear replaced by suites.meta.broken.ReplacesLinear" in note
