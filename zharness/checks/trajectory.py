"""The law of the trajectory: every step of training, judged on its own from the engine's own numbers.

Free-running, two correct summation orders part by more than any bound within a few steps. So each step is teacher
forced: the baseline starts from the weights, and the replay from the weights, gradients and state, that the engine had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.trial import Trial
from zharness.engines.protocol import GroupSpec, OptimizerSpec
from zharness.parity import Comparison, Mismatch, Part, Tier, identical, ranks_agree, within
from zharness.parity.baseline import Local
from zharness.parity.compare import check_names
from zharness.parity.replay import replay

STEPS = 3
OPTIMIZERS = {
    "adamw": OptimizerSpec(
        name="adamw",
        args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        groups=(GroupSpec("*bias", {"weight_decay": 0.0, "lr": 2e-2}),),
        schedule=(1.0, 0.5, 0.25),
    ),
    "sgd": OptimizerSpec(
        name="sgd",
        args={"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01},
        groups=(GroupSpec("*bias", {"weight_decay": 0.0}),),
        schedule=(1.0, 0.5, 0.25),
    ),
}


def observe_trajectory(bench: Bench) -> None:
    engine = bench.engine(optimizer=OPTIMIZERS[bench.variant])
    for step in range(STEPS):
        bench.record("params", engine.full_params(), step)
        bench.record_state("state", engine, step)
        engine.backward(bench.loss(engine, step))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    bench.record("params", engine.full_params(), STEPS)
    bench.record_state("state", engine, STEPS)
    engine.close()


def judge_trajectory(trial: Trial) -> Iterator[Comparison]:
    spec = OPTIMIZERS[trial.variant]
    yield from initial_weights(trial)
    for step in range(STEPS):
        params = trial.copies("params", step)[0]
        local = trial.locals(step, params)
        yield from forward(trial, step, local)
        yield from trial.reduced("grads", [local], step)
        yield from update(trial, step, spec)
        yield from everyone_agrees(trial, step + 1)


def initial_weights(trial: Trial) -> Iterator[Comparison]:
    """The engine starts from the weights of the model that it was given."""
    wanted = dict(trial.baseline.module().named_parameters())
    copy = trial.copies("params", 0)[0]
    check_names("full_params", wanted, copy)
    for name, tensor in wanted.items():
        yield identical(trial.place(name, Part.GATHER), tensor.detach(), copy[name])


def forward(trial: Trial, step: int, local: list[Local]) -> Iterator[Comparison]:
    """The engine's forward uses the weights that it reports; where it does not, perhaps the ones before the step."""
    for comparison in trial.same_loss(step, local):
        if comparison.mismatch is None or step == 0:
            yield comparison
        else:
            yield replace(comparison, mismatch=as_stale(trial, step, comparison.mismatch))


def as_stale(trial: Trial, step: int, mismatch: Mismatch) -> Mismatch:
    """Blame the gather when the loss is the one that the weights before the last step give."""
    before = trial.copies("params", step - 1)[0]
    stale = trial.baseline.local(mismatch.seen_on, step, before).loss
    if float(stale) != mismatch.actual:
        return mismatch
    return replace(mismatch, part=Part.GATHER, hint=f"the forward used the weights from before step {step - 1}")


def update(trial: Trial, step: int, spec: OptimizerSpec) -> Iterator[Comparison]:
    """Weights and state after the step are the replay of the optimizer's formula on those before it."""
    before, after = trial.copies("params", step)[0], trial.copies("params", step + 1)[0]
    kept, state = unflatten(trial.copies("state", step)[0]), unflatten(trial.copies("state", step + 1)[0])
    grads = trial.copies("grads", step)[0]
    for name, weight in before.items():
        if name not in grads:
            yield identical(trial.place(name, Part.OPTIMIZER, step), weight, after[name])
            continue
        own = {"step": torch.tensor(float(step))} | kept.get(name, {})  # an engine may keep the count to itself
        expected, moments = replay(spec.name, weight, grads[name], own, hyper(spec, name, step))
        for key, moment in moments.items():
            place = trial.place(f"{name}/{key}", Part.OPTIMIZER, step)
            found = state.get(name, {}).get(key, torch.full_like(weight, torch.nan))
            yield within(place, moment.value, found, moment.error, Tier.STAGED)
        place = trial.place(name, Part.OPTIMIZER, step)
        comparison = within(place, expected.value, after[name], expected.error, Tier.STAGED)
        yield hinted(comparison, weight, after[name])


def hinted(comparison: Comparison, before: Tensor, after: Tensor) -> Comparison:
    """Say so when the wrong weight is a weight that did not move at all."""
    if comparison.mismatch is None or not torch.equal(before, after):
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, hint="the step did not move this parameter"))


def hyper(spec: OptimizerSpec, name: str, step: int) -> dict[str, Any]:
    """The arguments that hold for one parameter in one step: its group's overrides, the schedule's factor on lr."""
    group = next((g for g in spec.groups if fnmatchcase(name, g.pattern)), GroupSpec(name, {}))
    merged = {**spec.args, **group.overrides}
    factor = spec.schedule[min(step, len(spec.schedule) - 1)]
    return {**merged, "lr": merged["lr"] * factor}


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``parameter/key`` entries as a dictionary for each parameter."""
    nested: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, _, key = path.rpartition("/")
        nested.setdefault(name, {})[key] = tensor
    return nested


def everyone_agrees(trial: Trial, step: int) -> Iterator[Comparison]:
    """Every rank reports the same weights and the same state after the step."""
    for label in ("params", "state"):
        copies = trial.copies(label, step)
        for name in copies[0]:
            yield from ranks_agree(trial.place(name, Part.GATHER, step - 1), [copy[name] for copy in copies])
