"""Define the law training.accumulation: several micro-batches give their mean gradient and one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.law_kit.accumulation import accumulate, judge_engine_divided_gradients
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext, divide_loss_by
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import SCHEDULED_SGD, ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.training.common import ALL_MODELS
from zharness.parity import Comparison, Tier
from zharness.parity.certificate import is_power_of_two

# Division by two is exact, and division by three rounds. Other laws cover a caller's window of one micro-batch.
ACCUMULATION_STEPS = {AccumulationOwner.ENGINE: (1, 2, 3), AccumulationOwner.CALLER: (2, 3)}

NUM_BOUNDARIES = 2

EVALUATED = "evaluated_by_"  # followed by the owner; for users' models, which have no other law that evaluates

OPTIMIZERS_BY_NAME = {"frozen": ZERO_LR_SGD, "moving": SCHEDULED_SGD}

CLIP = 0.1  # below the norm of a window's mean gradient, so that it clips


def observe_accumulation(ctx: RankContext) -> None:
    """Train accumulation windows with several numbers of micro-batches, and build a new engine for each number."""
    owner = get_owner(ctx.variant)
    own_kernels = ctx.config.stage in ctx.capabilities.own_kernels
    # An engine with its own kernels is judged by exact arithmetic alone: integer weights, and no division by three.
    optimizer_name = "frozen" if own_kernels else "moving"
    windows = [steps for steps in ACCUMULATION_STEPS[owner] if is_power_of_two(steps) or not own_kernels]
    # A user's model may be large: train only the window whose division rounds.
    for steps in windows[-1:] if is_evaluated(ctx.variant) else windows:
        observe_boundaries(ctx, owner, optimizer_name, steps)


def get_owner(variant: str) -> AccumulationOwner:
    """Return the accumulation owner that the variant of the law names."""
    return AccumulationOwner(variant.removeprefix(EVALUATED))


def is_evaluated(variant: str) -> bool:
    """Return whether an evaluation runs in each window of the variant."""
    return variant.startswith(EVALUATED)


def observe_boundaries(ctx: RankContext, owner: AccumulationOwner, optimizer_name: str, steps: int) -> None:
    """Train NUM_BOUNDARIES accumulation windows of ``steps`` micro-batches each on a new engine."""
    label = f"{optimizer_name}-{steps}"
    clips = (
        optimizer_name == "moving"
        and owner is AccumulationOwner.ENGINE
        and ctx.capabilities.refusal(Feature.CLIP) is None
    )
    clip, optimizer = CLIP if clips else None, OPTIMIZERS_BY_NAME[optimizer_name]
    engine = ctx.build_engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=optimizer, clip=clip)
    backward_calls = choose_backward_calls(ctx, engine, owner, steps)
    for boundary in range(NUM_BOUNDARIES):
        ctx.record_training_state(engine, boundary, f"-{label}")
        window, backward = (
            range(boundary * steps, (boundary + 1) * steps),
            backward_calls[boundary % len(backward_calls)],
        )
        between = partial(evaluate, ctx, engine, window[0]) if is_evaluated(ctx.variant) else lambda: None
        accumulate(ctx, engine, owner, window, f"loss-{label}", backward, between)
        ctx.record(f"grads-{label}", engine.full_grads(), boundary)
        engine.step()
        if clip is not None:
            norm = engine.grad_norm()
            ctx.record(f"norm-{label}", {} if norm is None else {"norm": scalar(norm)}, boundary)
        engine.zero_grad()
    ctx.record_training_state(engine, NUM_BOUNDARIES, f"-{label}")
    engine.close()


def evaluate(ctx: RankContext, engine: Engine, micro: int) -> None:
    """Run a forward of micro-batch ``micro`` under no_grad."""
    with torch.no_grad():
        ctx.batch(micro).feed(engine)


def choose_backward_calls(
    ctx: RankContext, engine: Engine, owner: AccumulationOwner, steps: int
) -> Sequence[Callable[[Tensor], object]]:
    """Return the ways to call backward; each accumulation window uses the next of these ways.

    ``engine.scale`` followed by torch's backward is one of the ways if the engine owns the accumulation, claims
    ``scale``, and division by ``steps`` is exact. If the division rounds, DeepSpeed's ``scale`` rounds the loss
    differently from its ``backward``, and the judge would not accept the result.
    """
    scales = ctx.capabilities.refusal(Feature.SCALE_BACKWARD) is None and is_power_of_two(steps)
    if owner is AccumulationOwner.ENGINE and scales:
        return engine.backward, lambda loss: torch.autograd.backward(engine.scale(loss))
    return (engine.backward,)


def judge_accumulation(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the gradients, the norm and the optimizer step of every recorded accumulation window."""
    for optimizer_name, optimizer in OPTIMIZERS_BY_NAME.items():
        for steps in ACCUMULATION_STEPS[get_owner(ctx.variant)]:
            label = f"{optimizer_name}-{steps}"
            if ctx.has_record(f"grads-{label}"):
                for boundary in range(NUM_BOUNDARIES):
                    yield from judge_boundary(ctx, label, boundary, steps)
                    before = RecordedStep(boundary, f"masters-{label}", f"state-{label}")
                    grads = ctx.rank_records(f"grads-{label}", boundary)[0]
                    factor = yield from judge_clip_factor(ctx, f"norm-{label}", boundary, grads, CLIP)
                    yield from judge_step(ctx, optimizer, grads, before, factor)
                    after = RecordedStep(boundary + 1, before.params_label, before.state_label)
                    yield from compare_ranks_after_step(ctx, after)
                    yield from compare_published_weights(ctx, after, f"params-{label}")


def judge_boundary(ctx: JudgeContext, label: str, boundary: int, steps: int) -> Iterator[Comparison]:
    """Compare the losses and gradients of one accumulation window.

    If the engine owns the accumulation, it may divide either the loss or the gradient. Both ways are right, but they
    round differently unless the divisor is a power of two. All gradients have to match the same way.
    """
    window = range(boundary * steps, (boundary + 1) * steps)
    params: Mapping[str, Tensor] = ctx.rank_records(f"params-{label}", boundary)[0]
    divided = [ctx.compute_local_grads(micro, params, weigh=divide_loss_by(steps)) for micro in window]
    for micro, local in zip(window, divided, strict=True):
        yield from ctx.compare_losses(micro, local, f"loss-{label}")
    exact = ctx.certify_exactness(window) and (boundary == 0 or label.startswith("frozen"))
    if get_owner(ctx.variant) is AccumulationOwner.ENGINE:
        yield from judge_engine_divided_gradients(ctx, f"grads-{label}", boundary, window, params, divided, exact)
    else:
        yield from ctx.compare_reduced_grads(f"grads-{label}", divided, boundary, exact, scale=steps)


LAWS = (
    Law(
        name="training.accumulation",
        statement="at every boundary, A micro-batches give the mean of their gradients and one step, for every A",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_accumulation,
        judge=judge_accumulation,
        compares_later_forwards=True,
        variants=(
            Variant("caller", (Feature.CALLER_ACCUMULATION,)),
            Variant("engine", (Feature.ENGINE_ACCUMULATION,)),
            Variant(f"{EVALUATED}caller", (Feature.CALLER_ACCUMULATION,), model_scope=ModelScope.USERS),
            Variant(f"{EVALUATED}engine", (Feature.ENGINE_ACCUMULATION,), model_scope=ModelScope.USERS),
        ),
        # Division by three rounds, and after a boundary the weights are no longer integers.
        steps=LawSteps(observe_accumulation, rounds=True),
        is_long=True,
        kept_because="the only law with every accumulation owner and window length, over two boundaries",
    ),
)
