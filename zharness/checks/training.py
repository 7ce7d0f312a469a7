"""The laws of ordinary training."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.checks.accumulation import FROZEN, judge_accumulation, observe_accumulation
from zharness.checks.bench import Bench
from zharness.checks.free_running import COURSE, judge_free_running, observe_free_running
from zharness.checks.kernels import judge_kernels, observe_kernels
from zharness.checks.law import Check
from zharness.checks.trajectory import (
    COURSES,
    TRAJECTORIES,
    judge_optimizers,
    judge_trajectory,
    observe_optimizers,
    observe_trajectory,
)
from zharness.checks.trial import Trial
from zharness.engines.protocol import Feature
from zharness.parity import Comparison, Tier
from zharness.parity.baseline import Weigh
from zharness.parity.certificate import mean_of_one

ALL_MODELS = ("mlp", "transformer", "conv", "exact", "fused")


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
    for chosen in range(trial.world_size):
        local = trial.locals(chosen, weigh=hot(chosen))
        yield from trial.same_loss(chosen, local)
        narrow = max(trial.dtype, trial.reduced_in, key=lambda dtype: torch.finfo(dtype).eps)
        exact = mean_of_one(local[chosen], trial.world_size, narrow, trial.baseline.loss_scale)
        yield from trial.reduced("grads", [local], step=chosen, exact=exact)


def hot(chosen: int) -> Weigh:
    """The loss of one rank, and nothing of every other's."""
    return lambda loss, rank: loss * float(rank == chosen)


CHECKS = (
    Check(
        name="training.grads",
        law="every full gradient after backward is the mean of the ranks' gradients, and equal on all ranks",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_grads,
        judge=judge_grads,
        any_model=("",),
    ),
    Check(
        name="training.one_hot_rank",
        law="if only rank k has a non-zero loss, N x gradient is the vanilla gradient of rank k's batch, bitwise",
        tier=Tier.EXACT,
        models=ALL_MODELS,
        observe=observe_one_hot_rank,
        judge=judge_one_hot_rank,
        any_model=("",),
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
        courses=TRAJECTORIES,
    ),
    Check(
        name="training.optimizers",
        law="AMSGrad, SGD with Nesterov and dampening, ten clipped steps and all other optimizers replay torch.optim's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_optimizers,
        judge=judge_optimizers,
        needs=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        variants=(("adam", ()), ("nesterov", ()), ("long", (Feature.CLIP,)), ("others", ()), ("rprop", ())),
        own_numbers=("others", "rprop"),
        courses=COURSES,
    ),
    Check(
        name="training.free_running",
        law="left to itself, the engine leaves vanilla's weights by no more than its gradients' differences explain",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_free_running,
        judge=judge_free_running,
        needs=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        courses={"": COURSE},
    ),
    Check(
        name="training.kernels",
        law="local gradients are as near to float64 as torch's own kernels give them; the reduced ones are their mean",
        tier=Tier.CALIBRATED,
        models=("mlp", "transformer"),
        observe=observe_kernels,
        judge=judge_kernels,
        dtypes=("fp32",),
        any_model=("",),
    ),
    Check(
        name="training.accumulation",
        law="A micro-batches give the mean of their gradients and one step, boundary after boundary, whatever A is",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_accumulation,
        judge=judge_accumulation,
        variants=(("caller", (Feature.CALLER_ACCUMULATION,)), ("engine", (Feature.ENGINE_ACCUMULATION,))),
        any_model=("caller", "engine"),
    ),
)
