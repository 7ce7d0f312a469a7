"""Every law fails on an engine that breaks it, and the first divergence names what was broken."""

from collections.abc import Iterator

import pytest

from suites.meta import test_autograd_laws_can_fail, test_precision_laws_can_fail, test_resource_laws_can_fail
from zharness.case import Case
from zharness.checks import CHECKS
from zharness.parity import Part
from zharness.run import Record, Request, Runner, Verdict, plan
from zharness.run.runner import surroundings

BROKEN = "suites.meta.broken:"
STATE = "suites.meta.broken_state:"

# (engine, check, model, variant): the law that has to notice, and the part of the step it has to name.
KILLS = {
    ("divides_by_one_rank_too_few", "training.grads", "mlp", ""): Part.REDUCTION,
    ("divides_by_one_rank_too_few", "training.grads", "exact", ""): Part.REDUCTION,
    ("never_reduces", "training.grads", "transformer", ""): Part.REDUCTION,
    ("never_reduces", "training.one_hot_rank", "conv", ""): Part.REDUCTION,
    ("a_ten_thousandth_too_much", "training.one_hot_rank", "mlp", ""): Part.REDUCTION,
    ("a_ten_thousandth_too_much", "training.grads", "conv", ""): Part.REDUCTION,
    ("loses_a_micro_batch", "training.accumulation", "mlp", "caller"): Part.ACCUMULATION,
    ("loses_a_micro_batch", "training.accumulation", "exact", "caller"): Part.ACCUMULATION,
    ("wrong_constants", "training.trajectory", "mlp", "adamw"): Part.OPTIMIZER,
    ("wrong_constants", "training.trajectory", "mlp", "sgd"): Part.OPTIMIZER,
    ("count_stands_still", "training.trajectory", "mlp", "adamw"): Part.OPTIMIZER,
    ("foreign_moments", "training.trajectory", "mlp", "sgd"): Part.OPTIMIZER,
    ("hasty_schedule", "training.accumulation", "mlp", "engine"): Part.OPTIMIZER,
    ("steps_on_the_first_loss", "double_backward.retained_then_zero_grad", "mlp", ""): Part.OPTIMIZER,
    ("steps_late", "training.trajectory", "transformer", "adamw"): Part.OPTIMIZER,
    ("one_rank_slips", "training.trajectory", "mlp", "sgd"): Part.GATHER,
    ("silent_transform", "torch_func.grad", "mlp", ""): Part.LOCAL_GRADIENT,
    ("silent_transform", "torch_func.vmap_grad", "conv", ""): Part.LOCAL_GRADIENT,
    ("scaled_transform", "torch_func.grad", "exact", ""): Part.LOCAL_GRADIENT,
    ("zero_grad_forgets_nothing", "double_backward.retained_then_zero_grad", "mlp", ""): Part.REDUCTION,
    ("zero_grad_forgets_nothing", "double_backward.retained_then_zero_grad", "exact", "tensor"): Part.REDUCTION,
    (STATE + "drops_moments", "state.resume", "mlp", "adamw"): Part.OPTIMIZER,
    (STATE + "drops_moments", "state.resume", "mlp", "sgd"): Part.OPTIMIZER,
    (STATE + "restarts_counts", "state.resume", "mlp", "adamw"): Part.OPTIMIZER,
    (STATE + "restarts_schedule", "state.resume", "mlp", "sgd"): Part.OPTIMIZER,
    (STATE + "slips_shards", "state.reshard", "mlp", ""): Part.GATHER,
    (STATE + "swaps_moments", "state.universal", "mlp", "shaped"): Part.OPTIMIZER,
    (STATE + "restarts_schedule", "state.universal", "mlp", "flat"): Part.OPTIMIZER,
    (STATE + "loads_half", "state.universal", "mlp", "shaped"): Part.GATHER,
    (STATE + "passes_over_damage", "state.universal", "mlp", "flat"): Part.GATHER,
    (STATE + "unpickles", "state.refuse_pickle", "mlp", ""): Part.GATHER,
    (STATE + "unties", "state.consolidate", "transformer", ""): Part.GATHER,
    (STATE + "saves_old_weights", "state.consolidate", "transformer", ""): Part.GATHER,
}


FAULTS = {
    "raises_in_backward": (Verdict.CRASH, "IndexError: list index out of range"),
    "dies_in_backward": (Verdict.CRASH, "rank 1 was ended by a signal: SIGSEGV"),
    "hangs_in_backward": (Verdict.HANG, "did not finish in time"),
    "wrong_names": (Verdict.FAIL, "full_grads has the wrong names"),
    "returns_nothing": (Verdict.FAIL, "grads: the engine returned a NoneType, expected a dictionary"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    faults = {*FAULTS, "ranks_report_other_names"}
    names = sorted(path_of(engine) for engine in {engine for engine, *_ in KILLS} | faults)
    with Runner({name: surroundings(name) for name in names}, timeout=10.0) as started:
        yield started


def path_of(engine: str) -> str:
    return engine if ":" in engine else BROKEN + engine


def run_one(runner: Runner, case: Case) -> Record:
    (planned,) = plan(Request(patterns=(case.id,)), runner.claims)
    assert not planned.unsupported, planned.unsupported
    return runner.run(planned)


@pytest.mark.parametrize(
    ("key", "part"),
    KILLS.items(),
    ids=lambda value: "-".join(filter(None, value)) if isinstance(value, tuple) else value.name,
)
def test_a_broken_engine_fails_the_law_and_the_part_is_named(runner: Runner, key: tuple[str, ...], part: Part) -> None:
    engine, check, model, variant = key
    record = run_one(runner, Case(check, path_of(engine), 0, 2, "fp32", model, variant))
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None
    assert record.divergence.part is part, record.cause
    names = {"loss", "input", "refused", "command"} | {name.split("/")[0] for name in parameter_names(model)}
    assert record.divergence.parameter.split("/")[0] in names


def parameter_names(model: str) -> list[str]:
    from zharness.workload import model_spec

    return list(model_spec(model).model(0).state_dict())


def test_every_law_is_broken_by_some_engine_here() -> None:
    more = (*test_autograd_laws_can_fail.KILLS, *test_autograd_laws_can_fail.MISNAMED)
    more += (*test_precision_laws_can_fail.KILLS, *test_resource_laws_can_fail.KILLS)
    assert {check for _, check, *_ in (*KILLS, *more)} == set(CHECKS)


@pytest.mark.parametrize(("fault", "verdict", "cause"), [(name, *rest) for name, rest in FAULTS.items()], ids=FAULTS)
def test_a_fault_of_the_engine_is_named_and_is_no_error_of_the_harness(
    runner: Runner, fault: str, verdict: Verdict, cause: str
) -> None:
    record = run_one(runner, Case("training.grads", BROKEN + fault, 0, 2, "fp32", "mlp"))
    assert record.verdict is verdict, record.cause
    assert cause in record.cause


def test_ranks_that_report_other_names_break_the_engine_s_contract(runner: Runner) -> None:
    engine = BROKEN + "ranks_report_other_names"
    record = run_one(runner, Case("training.trajectory", engine, 0, 2, "fp32", "mlp", "sgd"))
    assert record.verdict is Verdict.FAIL, record.cause
    assert "unknown ['ghost/exp_avg']" in record.cause


def test_the_right_engine_under_the_same_wrapper_passes(runner: Runner) -> None:
    record = run_one(runner, Case("training.grads", BROKEN + "steps_late", 0, 2, "fp32", "mlp"))
    assert record.verdict is Verdict.PASS, record.cause
