"""The law of looking: an engine that is asked for everything at every turn trains as one that nobody looks at."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.checks.bench import Bench
from zharness.checks.state import same_records
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, OptimizerSpec
from zharness.parity import Comparison, Part

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2}, schedule=(1.0, 0.5))
STEPS = 2


def observe_looked_at(bench: Bench) -> None:
    unseen, seen = bench.engine(optimizer=ADAMW), bench.engine(optimizer=ADAMW)
    for step in range(STEPS):
        unseen.backward(bench.loss(unseen, step, "loss-unseen"))
        unseen.step()
        unseen.zero_grad()
    for step in range(STEPS):
        look(seen)
        loss = bench.loss(seen, step, "loss-seen")
        look(seen)
        seen.backward(loss)
        for name in ("once", "twice"):
            bench.record(f"grads-{name}", seen.full_grads(), step)
            look(seen)
        seen.step()
        look(seen)
        seen.zero_grad()
    for engine, label in ((unseen, "unseen"), (seen, "seen")):
        bench.record_trained(engine, STEPS, f"-{label}")
        engine.close()


def look(engine: Engine) -> None:
    """Ask for all that an engine shows whenever it is asked. Collective."""
    engine.full_params()
    engine.full_optimizer_state()
    engine.layout()
    engine.observe()
    engine.grad_norm()


def judge_looked_at(trial: Trial) -> Iterator[Comparison]:
    """Bitwise: both engines are of one make, and run the same collectives in one order."""
    for step in range(STEPS):
        yield from same_records(trial, "loss-unseen", "loss-seen", step, step, Part.FORWARD)
        yield from same_records(trial, "grads-once", "grads-twice", step, step, Part.REDUCTION)
    for what in ("params", "masters", "state"):
        yield from same_records(trial, f"{what}-unseen", f"{what}-seen", STEPS, STEPS, Part.OPTIMIZER)
