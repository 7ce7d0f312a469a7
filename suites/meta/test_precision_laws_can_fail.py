"""Every law of precision fails on an engine that breaks it."""

from collections.abc import Iterator

import pytest

from zharness.case import Case
from zharness.parity import Part
from zharness.run import Request, Runner, Verdict, plan
from zharness.run.runner import surroundings

BROKEN = "suites.meta.broken_precision:"

# (engine, check, model, variant): the law that has to notice, and the part of the step it has to name.
KILLS = {
    ("autocast_forgotten", "precision.autocast_policy", "mixed", ""): Part.LOCAL_GRADIENT,
    ("backward_leaves_autocast", "precision.autocast_states", "mixed", ""): Part.REDUCTION,
    ("outer_autocast_wins", "precision.autocast_nested", "mixed", ""): Part.FORWARD,
    ("every_gradient_travels_low", "precision.safe_modules", "mixed", ""): Part.REDUCTION,
    ("every_gradient_travels_low", "precision.safe_modules", "mixed", "custom"): Part.REDUCTION,
    ("scaled_norm", "precision.autocast_norm", "mixed", ""): Part.OPTIMIZER,
    ("late_scaler", "precision.grad_scaler", "mixed", "fp16"): Part.OPTIMIZER,
    ("scale_forgotten", "precision.grad_scaler", "mixed", "autocast"): Part.OPTIMIZER,
    ("one_wire_for_all", "precision.comm_dtype", "mixed", ""): Part.REDUCTION,
    ("masters_forgotten", "precision.master_weights", "mixed", "fp32"): Part.OPTIMIZER,
    ("buffers_lowered", "precision.buffers_keep_dtype", "mixed", "bf16"): Part.OPTIMIZER,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    names = sorted({BROKEN + engine for engine, *_ in KILLS})
    with Runner({name: surroundings(name) for name in names}, timeout=10.0) as started:
        yield started


@pytest.mark.parametrize("key", KILLS, ids=lambda key: "-".join(filter(None, key)))
def test_a_broken_engine_fails_the_law_and_the_part_is_named(runner: Runner, key: tuple[str, ...]) -> None:
    engine, check, model, variant = key
    (planned,) = plan(Request(patterns=(Case(check, BROKEN + engine, 0, 2, "fp32", model, variant).id,)), runner.claims)
    assert not planned.unsupported, planned.unsupported
    record = runner.run(planned)
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None, record.cause
    assert record.divergence.part is KILLS[key], record.cause
