"""Define the law training.muon: each step of Muon works on whole matrices, also if ranks share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.engines.protocol import Feature, OptimizerSpec
from zharness.law_kit.hints import hint_unmoved
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.muon import MOMENTUM, MUON_STEPS, MuonStep, bound_step

MUON = OptimizerSpec("muon", {"lr": 2.0**-5, "momentum": 0.75, "weight_decay": 0.5})

STEPS = 3


def observe_muon(ctx: RankContext) -> None:
    """Train several steps with Muon."""
    engine = ctx.build_engine(optimizer=MUON)
    for step in range(STEPS):
        ctx.record_training_state(engine, step)
        ctx.train(engine, step)
        engine.step()
        engine.zero_grad()
    ctx.record_training_state(engine, STEPS)
    engine.close()


def judge_muon(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every step bitwise with that of one definition of Muon, the same one for every weight and step.

    The gradients are plain PyTorch's, because an engine may keep its update in their place. If ranks share a matrix
    and no definition fits, the engine may compute norms from shards, so that weights are compared within their bound.
    Otherwise the comparisons are those with torch.optim.
    """
    grads = [average_gradients(ctx, step) for step in range(STEPS)]
    by_definition = [list(compare_steps(ctx, definition, grads)) for definition in MUON_STEPS.values()]
    fitting = [found for found in by_definition if all(comparison.mismatch is None for comparison in found)]
    if not fitting and any(len(ctx.evidence[0].layout.get(name, ())) > 1 for name in grads[0]):
        fitting.append(list(compare_steps_within_bounds(ctx, grads)))
    yield from (fitting or by_definition)[0]
    for step in range(1, STEPS + 1):
        yield from compare_ranks_after_step(ctx, RecordedStep(step))


def average_gradients(ctx: JudgeContext, step: int) -> dict[str, Tensor]:
    """Return the mean over ranks of plain PyTorch's gradients, which are integers."""
    local = [result.grads for result in ctx.compute_local_grads(step)]
    return {name: torch.stack([grads[name] for grads in local]).sum(dim=0) / len(local) for name in local[0]}


@dataclass(frozen=True)
class MatrixStep:
    """What an engine recorded of one matrix before and after a step, and the gradient that the step used."""

    step: int
    name: str
    grad: Tensor
    weight: Tensor
    momentum: Tensor
    weight_after: Tensor
    momentum_after: Tensor


def list_steps(ctx: JudgeContext, grads: list[dict[str, Tensor]]) -> Iterator[MatrixStep]:
    """Yield each step of each matrix. A momentum that the engine does not report is NaN."""
    for step in range(STEPS):
        before, after = (ctx.rank_records("masters", at)[0] for at in (step, step + 1))
        old_state, new_state = (ctx.rank_records("state", at)[0] for at in (step, step + 1))
        for name, weight in before.items():
            momentum = get_momentum(old_state, name, weight, step)
            momentum_after = get_momentum(new_state, name, weight, step + 1)
            yield MatrixStep(step, name, grads[step][name], weight, momentum, after[name], momentum_after)


def compare_momentum(ctx: JudgeContext, taken: MatrixStep, expected: Tensor) -> Comparison:
    """Compare the momentum after a step bitwise with ``expected``."""
    place = ctx.location(f"{taken.name}/{MOMENTUM}", Part.OPTIMIZER, taken.step)
    return compare_bitwise(place, expected, taken.momentum_after)


def compare_steps(ctx: JudgeContext, definition: MuonStep, grads: list[dict[str, Tensor]]) -> Iterator[Comparison]:
    """Compare weights and momentum after each step with ``definition``, which starts from the engine's own numbers."""
    for taken in list_steps(ctx, grads):
        expected = definition(taken.weight, taken.grad, taken.momentum, MUON.args)
        yield compare_momentum(ctx, taken, expected.momentum)
        place = ctx.location(taken.name, Part.OPTIMIZER, taken.step)
        comparison = compare_bitwise(place, expected.weight, taken.weight_after)
        yield hint_unmoved(comparison, taken.weight, taken.weight_after)


def compare_steps_within_bounds(ctx: JudgeContext, grads: list[dict[str, Tensor]]) -> Iterator[Comparison]:
    """Compare the momentum after each step bitwise, and the weights within the rounding of Newton-Schulz."""
    beta = MUON.args["momentum"]
    for taken in list_steps(ctx, grads):
        momentum = taken.momentum.lerp(taken.grad, 1 - beta)
        yield compare_momentum(ctx, taken, momentum)
        expected, error = bound_step(taken.weight, taken.grad.lerp(momentum, beta), MUON.args)
        place = ctx.location(taken.name, Part.OPTIMIZER, taken.step)
        change = expected - taken.weight.double()
        comparison = compare_within_bound(place, expected, taken.weight_after, error, signal=change)
        yield hint_unmoved(comparison, taken.weight, taken.weight_after)


def get_momentum(state: Mapping[str, Tensor], name: str, weight: Tensor, step: int) -> Tensor:
    """Return the momentum of ``name`` that was recorded before ``step``; zeros before the first step.

    If the engine reports no momentum, the result is NaN, which differs from every momentum.
    """
    return state.get(f"{name}/{MOMENTUM}", torch.full_like(weight, torch.nan)) if step else torch.zeros_like(weight)


LAWS = (
    Law(
        name="training.muon",
        statement="a step of Muon scales a matrix of momentum by the norm of the whole, bitwise as plain PyTorch does",
        tier=Tier.EXACT,
        models=("matrices",),
        observe=observe_muon,
        judge=judge_muon,
        features=(Feature.MUON,),
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=(Variant(compares_engine_with_itself=True),),
        steps=LawSteps(observe_muon),
        kept_because="the only optimizer whose update of a shard depends on the norm of the other shards",
    ),
)
