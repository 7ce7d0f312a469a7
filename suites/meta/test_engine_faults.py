"""An engine that crashes, hangs or breaks the protocol is reported as broken, never as an error of the harness."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from zharness.cell import Cell
from zharness.engines import Feature
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.report.failures import render_failures
from zharness.run import Record, Request, Runner, Verdict, plan
from zharness.run.cell_planner import PlannedCell
from zharness.run.runner import WithheldPolicy
from zharness.world import Isolation

BROKEN, MUTANTS = "suites.meta.broken:", "zharness.mutants:"

FAULTS = {
    "raises_in_backward": (Verdict.CRASH, "IndexError: list index out of range"),
    "dies_in_backward": (Verdict.CRASH, "rank 1 was ended by a signal: SIGSEGV"),
    "hangs_in_backward": (Verdict.HANG, "did not finish in time"),
    "changes_weights": (Verdict.FAIL, "rank 1 raised: EngineContractError: the engine changed the initial weights of"),
}
CHANGES = {  # with the law and model of a cell whose model has what the engine changes
    "changes_a_buffer": ("precision.autocast_norm", "mixed", "rank 1 raised", "the engine changed the buffer 'shift'"),
    "converts_a_buffer": (
        *("precision.autocast_norm", "mixed", "raised"),
        "changed the dtype of the buffer 'shift' from torch.float32 to torch.float64",
    ),
    "changes_a_factor": (
        *("backward.engine_backward", "blocks", "raised"),
        "the engine changed the initial weights of 'factor'",
    ),
}
BUILD_ERRORS = {
    "changes_weights_inside": "full_params() of engine '{}': the engine changed the initial weights of 'first",
    "wrong_names": "full_grads() of engine '{}': full_grads has the wrong names: missing",
    "wrong_shapes": "full_grads['first.weight']: the engine returned the shape (",
    "returns_nothing": "full_grads: the engine returned a NoneType; expected a dictionary",
    "renames": "the model's state dict, after the engine was built, has the wrong names: missing none, unknown",
    "stops_training": "the engine changed the training flag of first",
    "freezes": "the engine changed requires_grad of 'first.weight'; only the caller may choose which parameters train",
    "lacks_a_method": "returned a LacksAMethod, which is not an Engine: missing save; zharness.engines.Engine",
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    names = [
        *(BROKEN + fault for fault in (*FAULTS, *CHANGES)),
        *(BROKEN + name for name in ("replaces_linear", "leaves_a_shard")),
        MUTANTS + "steps_late",
    ]
    with Runner({name: build_warm_up_environment(name) for name in names}, timeout=10.0) as started:
        yield started


def run_one(runner: Runner, cell: Cell) -> Record:
    (planned,) = plan(Request(patterns=(cell.id,)), runner.claims)
    assert not planned.unsupported_reason, planned.unsupported_reason
    return runner.run(planned)


@pytest.mark.parametrize(("fault", "verdict", "cause"), [(name, *rest) for name, rest in FAULTS.items()], ids=FAULTS)
def test_a_fault_of_the_engine_is_reported_and_is_no_error_of_the_harness(
    runner: Runner, fault: str, verdict: Verdict, cause: str
) -> None:
    record = run_one(runner, Cell("training.grads", BROKEN + fault, 0, 2, "fp32", "mlp"))
    assert record.verdict is verdict, record.cause
    assert cause in record.cause


@pytest.mark.parametrize(
    ("fault", "law", "model", "reporter", "message"), [(name, *rest) for name, rest in CHANGES.items()]
)
def test_an_engine_that_changes_its_model_at_construction_is_refused(
    runner: Runner, fault: str, law: str, model: str, reporter: str, message: str
) -> None:
    record = run_one(runner, Cell(law, BROKEN + fault, 0, 2, "fp32", model))
    assert record.verdict is Verdict.FAIL, record.cause
    assert f"{reporter}: EngineContractError" in record.cause
    assert message in record.cause


def test_a_mutant_passes_a_law_that_it_does_not_break(runner: Runner) -> None:
    record = run_one(runner, Cell("training.grads", MUTANTS + "steps_late", 0, 2, "fp32", "mlp"))
    assert record.verdict is Verdict.PASS, record.cause


def test_weights_that_stay_sharded_on_one_rank_after_close_are_reported(runner: Runner) -> None:
    record = run_one(runner, Cell("resources.close", BROKEN + "leaves_a_shard", 0, 2, "fp32", "exact"))
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None
    assert record.divergence.parameter == "whole"


def test_an_engine_that_replaces_a_torch_function_is_reported_and_does_not_affect_the_baseline(
    runner: Runner,
) -> None:
    record = run_one(runner, Cell("training.grads", BROKEN + "replaces_linear", 0, 2, "fp32", "mlp"))
    assert record.verdict is Verdict.PASS, record.cause
    (note,) = record.notes
    assert "torch.nn.functional.linear is replaced by suites.meta.broken.ReplacesLinear" in note


@pytest.mark.parametrize(("fault", "message"), BUILD_ERRORS.items(), ids=BUILD_ERRORS)
def test_a_fault_at_construction_is_one_error_before_any_cell(fault: str, message: str) -> None:
    name = BROKEN + fault
    with Runner({name: build_warm_up_environment(name)}) as started, pytest.raises(UsageError) as raised:
        started.claims(name, 0)
    assert message.format(name) in str(raised.value)


def test_a_withheld_feature_that_works_is_reported_when_it_is_probed() -> None:
    name = BROKEN + "modest"
    with Runner({name: build_warm_up_environment(name)}, withheld_policy=WithheldPolicy.TRY) as started:
        request = Request(("double_backward.retained_then_zero_grad",), (name,), models=("exact",))
        records = [started.run(planned) for planned in plan(request, started.claims)]
    assert {(record.verdict, record.is_expected) for record in records} == {(Verdict.UNSUPPORTED, True)}
    assert all(record.withheld_feature == "a second backward on a retained graph" for record in records)
    assert f"WITHHELD {name} does not claim a second backward" in render_failures(records)


class NotesIsolation(Runner):
    """A runner whose cells pass without ranks, and which notes how each was to be isolated."""

    isolations: tuple[Isolation, ...] = ()

    def _run_once(self, cell: Cell, blank_record: Record, options: Mapping[str, Any], isolation: Isolation) -> Record:
        self.isolations += (isolation,)
        return replace(blank_record, verdict=Verdict.PASS)


def test_a_trial_of_a_withheld_feature_has_fresh_ranks_if_the_law_needs_them() -> None:
    laws = ("training.caller_modes", "training.grads")
    with NotesIsolation({}, isolation=Isolation.POOLED, withheld_policy=WithheldPolicy.TRY) as started:
        for law in laws:
            cell = Cell(law, "reference", 0, 2, "fp32", "mlp")
            record = started.run(PlannedCell(cell, "not claimed", Feature.SUBMODULES))
            assert record.withheld_feature == Feature.SUBMODULES.value
            started.run(PlannedCell(cell))
    assert started.isolations == (Isolation.FRESH,) * 2 + (Isolation.POOLED,) * 2
