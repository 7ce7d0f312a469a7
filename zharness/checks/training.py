"""The laws of ordinary training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.trajectory import judge_trajectory, observe_trajectory
from zharness.checks.trial import Trial
from zharness.engines.protocol import AccumulationOwner, Engine, Feature, OptimizerSpec
from zharness.parity import Comparison, Tier
from zharness.parity.baseline import Objective
from zharness.parity.certificate import is_power_of_two
from zharness.workload import Batch

ALL_MODELS = ("mlp", "transformer", "conv", "exact", "fused")
ACCUMULATIONS = (1, 2, 3)
FROZEN = OptimizerSpec(name="sgd", args={"lr": 0.0})  # a step that ends the boundary and moves nothing


def observe_grads(bench: Bench) -> None:
    engine = bench.engine()
    engine.backward(bench.loss(engine, step=0))
    bench.record("grads", engine.full_grads())
    engine.close()


def judge_grads(trial: Trial) -> Iterator[Comparison]:
    local = trial.locals(step=0)
    yield from trial.same_loss(0, local)
    yield from trial.reduced("grads", [local], exact=trial.exact(range(1)))


def observe_one_hot_rank(bench: Bench) -> None:
    engine = bench.engine(optimizer=FROZEN)
    for chosen in range(bench.world_size):
        loss = bench.loss(engine, step=chosen) * float(bench.rank == chosen)
        engine.backward(loss)
        bench.record("grads", engine.full_grads(), step=chosen)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_one_hot_rank(trial: Trial) -> Iterator[Comparison]:
    """Exact whatever the model: all but one of the summed numbers are zero, and N is a power of two."""
    exact = is_power_of_two(trial.world_size)
    for chosen in range(trial.world_size):
        yield from trial.same_loss(chosen, trial.locals(chosen))
        local = [
            trial.baseline.local(rank, chosen, objective=times(trial, int(rank == chosen), 1))
            for rank in range(trial.world_size)
        ]
        yield from trial.reduced("grads", [local], step=chosen, exact=exact)


def times(trial: Trial, factor: int, divisor: int) -> Objective:
    """The baseline's loss times ``factor`` over ``divisor``, in the order in which a user writes it."""

    def objective(output: Tensor, batch: Batch) -> Tensor:
        return trial.baseline.objective(output, batch) * float(factor) / divisor

    return objective


def observe_accumulation(bench: Bench) -> None:
    for owner in bench.owners():
        for steps in accumulations(bench):
            engine = bench.engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=FROZEN)
            for boundary in range(2):
                accumulate(bench, engine, owner, range(boundary * steps, (boundary + 1) * steps))
                bench.record(f"{owner.value}-{steps}", engine.full_grads(), step=boundary)
                engine.step()
                engine.zero_grad()
            engine.close()


def accumulations(bench: Bench) -> tuple[int, ...]:
    """The numbers of micro-batches. A third of an integer is no integer: kernels of the engine's own round it apart."""
    own_kernels = bench.config.stage in bench.capabilities.own_kernels
    return tuple(steps for steps in ACCUMULATIONS if is_power_of_two(steps) or not own_kernels)


def accumulate(bench: Bench, engine: Engine, owner: AccumulationOwner, window: range) -> None:
    """Forward and backward of every micro-step of ``window``, up to the boundary but not over it."""
    for micro in window:
        loss = bench.loss(engine, micro)
        engine.backward(loss if owner is AccumulationOwner.ENGINE else loss / len(window))
        if owner is AccumulationOwner.ENGINE and micro != window[-1]:
            engine.step()


def judge_accumulation(trial: Trial) -> Iterator[Comparison]:
    recorded = {snapshot.label for snapshot in trial.evidence[0].snapshots}
    for owner in AccumulationOwner:
        for steps in ACCUMULATIONS:
            if f"{owner.value}-{steps}" in recorded:
                for boundary in range(2):
                    window = range(boundary * steps, (boundary + 1) * steps)
                    yield from judge_boundary(trial, owner, boundary, window)


def judge_boundary(trial: Trial, owner: AccumulationOwner, boundary: int, window: range) -> Iterator[Comparison]:
    """One boundary. An engine that owns the division may divide the loss or the gradient: both are right, and by
    anything but a power of two they round apart, so it has to match one of the two throughout.
    """
    label, steps = f"{owner.value}-{len(window)}", len(window)
    divided = [trial.locals(micro, objective=times(trial, 1, steps)) for micro in window]
    exact = trial.exact(window)
    by_loss = list(trial.reduced(label, divided, boundary, exact, scale=steps))
    if owner is AccumulationOwner.ENGINE and any(found.mismatch for found in by_loss):
        yield from trial.reduced(label, [trial.locals(micro) for micro in window], boundary, exact)
    else:
        yield from by_loss


CHECKS = (
    Check(
        name="training.grads",
        law="every full gradient after backward is the mean of the ranks' gradients, and equal on all ranks",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_grads,
        judge=judge_grads,
    ),
    Check(
        name="training.one_hot_rank",
        law="if only rank k has a non-zero loss, N x gradient is the vanilla gradient of rank k's batch, bitwise",
        tier=Tier.EXACT,
        models=ALL_MODELS,
        observe=observe_one_hot_rank,
        judge=judge_one_hot_rank,
    ),
    Check(
        name="training.trajectory",
        law="each of several optimizer steps is the replay of torch.optim's formula on the engine's own numbers",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_trajectory,
        judge=judge_trajectory,
        needs=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        variants=(("adamw", ()), ("sgd", ())),
    ),
    Check(
        name="training.accumulation",
        law="the gradient of A micro-batches is the mean of their gradients, for A = 1, 2, 3, boundary after boundary",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_accumulation,
        judge=judge_accumulation,
    ),
)
