"""The law of the free run: weights leave vanilla's by no more than the differences of the gradients carry them.

Nothing is taken from the engine but its gradients: no state, and no weights to start a step from. The replay runs on
from the initial weights, and carries along how far each gradient was from vanilla's; that gives the bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.course import Course
from zharness.checks.optimizer_step import hyper, same_count, told, unflatten
from zharness.checks.trajectory import ADAMW
from zharness.checks.trial import Trial
from zharness.parity import Comparison, Part, Tier, identical, within
from zharness.parity.bounds import Bounded, mean_and_bound
from zharness.parity.compare import check_names
from zharness.parity.replay import propagate

STEPS = 5
COURSE = Course(ADAMW, STEPS)
ENDLESS = torch.finfo(torch.float64).max  # the bound of what is not known at all: compared, it would always pass


def observe_free_running(bench: Bench) -> None:
    engine = bench.engine(optimizer=ADAMW)
    bench.record_trained(engine, 0)
    for step in range(STEPS):
        engine.backward(bench.loss(engine, step))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        bench.record_weights(engine, step + 1)
    engine.close()


def judge_free_running(trial: Trial) -> Iterator[Comparison]:
    """Elements whose bound exceeds the way that they have come are undetermined, and counted."""
    initial = {name: p.detach() for name, p in trial.baseline.spec.model(trial.baseline.seed).named_parameters()}
    yield from same_count(trial, unflatten(trial.copies("state")[0]), 0, 0)
    for rank, copy in enumerate(trial.copies("masters", 0)):
        check_names("full_params", initial, copy)
        for name, start in initial.items():
            found = identical(trial.place(name, Part.OPTIMIZER, 0, rank), start, copy[name])
            yield begun(trial, found, start, copy[name])
    free = {name: Bounded.exact(weight) for name, weight in initial.items()}
    states: dict[str, dict[str, Bounded]] = {name: {} for name in free}
    for step in range(STEPS):
        local = trial.locals(step, {name: weight.value.float() for name, weight in free.items()})
        grads = trial.copies("grads", step)[0]
        check_names("full_grads", local[0].grads, grads)
        for name, grad in grads.items():
            mean, _ = mean_and_bound([one.grads[name] for one in local], trial.reduced_in)
            apart = Bounded(mean, (grad.double() - mean).abs(), initial[name].dtype)
            settings = hyper(ADAMW, name, step)
            free[name], states[name] = propagate(ADAMW.name, free[name], apart, states[name], step, settings)
        for rank, copy in enumerate(trial.copies("masters", step + 1)):
            check_names("full_params", free, copy)
            for name, weight in free.items():
                place, way = trial.place(name, Part.OPTIMIZER, step, rank), weight.value - initial[name].double()
                bound = weight.error.nan_to_num(nan=ENDLESS, posinf=ENDLESS)
                yield within(place, weight.value, copy[name], bound, Tier.STAGED, signal=way)


def begun(trial: Trial, comparison: Comparison, weight: Tensor, found: Tensor) -> Comparison:
    """Say so when a training that keeps wide masters begins with weights that were rounded before."""
    rounded = torch.equal(weight.to(trial.dtype).to(found.dtype), found)
    return told(comparison, f"they are the initial weights, rounded to {trial.dtype}") if rounded else comparison
