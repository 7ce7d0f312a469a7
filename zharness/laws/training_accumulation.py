"""The law of accumulation: several micro-batches, one boundary, one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Engine, Feature, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext, divide_loss_by, stop_at_first_mismatch
from zharness.law_kit.optimizer_step import (
    NO_CLIPPING,
    ClipFactor,
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    hint_missing_norm,
    judge_step,
)
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.parity import Comparison, Part, compare_within_bound
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import Exactness, is_power_of_two
from zharness.workload.user_model import is_user_model

# Of two, a division is exact; of three, it rounds. A caller's window of one is what every other law of training has.
ACCUMULATION_STEPS = {AccumulationOwner.ENGINE: (1, 2, 3), AccumulationOwner.CALLER: (2, 3)}
NUM_BOUNDARIES = 2
# A step that moves nothing but its momentum, which tells how often it was made, and on which gradient.
ZERO_LR_SGD = OptimizerSpec(name="sgd", args={"lr": 0.0, "momentum": 0.5})
SCHEDULED_SGD = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5}, schedule=(1.0, 0.5))
OPTIMIZERS_BY_NAME = {"frozen": ZERO_LR_SGD, "moving": SCHEDULED_SGD}
CLIP = 0.1  # below the norm of the mean of a window's gradients


def observe_accumulation(ctx: RankContext) -> None:
    owner = AccumulationOwner(ctx.variant)
    own_kernels = ctx.config.stage in ctx.capabilities.own_kernels
    # Kernels of the engine's own are judged by exact arithmetic alone: integer weights, and no thirds of them.
    chosen = "frozen" if own_kernels else "moving"
    windows = [steps for steps in ACCUMULATION_STEPS[owner] if is_power_of_two(steps) or not own_kernels]
    # Of anyone's model, which may be large, one window: that whose division rounds.
    for steps in windows[-1:] if is_user_model(ctx.spec.name) else windows:
        observe_boundaries(ctx, owner, chosen, steps)


def observe_boundaries(ctx: RankContext, owner: AccumulationOwner, optimizer_name: str, steps: int) -> None:
    """Train BOUNDARIES boundaries of ``steps`` micro-batches on an engine of their own."""
    label = f"{optimizer_name}-{steps}"
    clips = (
        optimizer_name == "moving"
        and owner is AccumulationOwner.ENGINE
        and ctx.capabilities.refusal(Feature.CLIP) is None
    )
    clip, optimizer = CLIP if clips else None, OPTIMIZERS_BY_NAME[optimizer_name]
    engine = ctx.build_engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=optimizer, clip=clip)
    spellings = choose_backward_calls(ctx, engine, owner, steps)
    for boundary in range(NUM_BOUNDARIES):
        ctx.record_training_state(engine, boundary, f"-{label}")
        window, backward = range(boundary * steps, (boundary + 1) * steps), spellings[boundary % len(spellings)]
        accumulate(ctx, engine, owner, window, f"loss-{label}", backward)
        ctx.record(f"grads-{label}", engine.full_grads(), boundary)
        engine.step()
        if clip is not None:
            norm = engine.grad_norm()
            ctx.record(f"norm-{label}", {} if norm is None else {"norm": scalar(norm)}, boundary)
        engine.zero_grad()
    ctx.record_training_state(engine, NUM_BOUNDARIES, f"-{label}")
    engine.close()


def choose_backward_calls(
    ctx: RankContext, engine: Engine, owner: AccumulationOwner, steps: int
) -> Sequence[Callable[[Tensor], object]]:
    """How the backwards of one window after the other are spelled: by scale, too, where the engine divides and that is
    exact. By a third, DeepSpeed's scale rounds the loss otherwise than its backward does, and otherwise than the two
    that it is held against."""
    scales = ctx.capabilities.refusal(Feature.SCALE_BACKWARD) is None and is_power_of_two(steps)
    if owner is AccumulationOwner.ENGINE and scales:
        return engine.backward, lambda loss: torch.autograd.backward(engine.scale(loss))
    return (engine.backward,)


def accumulate(
    ctx: RankContext,
    engine: Engine,
    owner: AccumulationOwner,
    window: range,
    label: str,
    backward: Callable[[Tensor], object],
) -> None:
    """Forward and ``backward`` of every micro-step of ``window``, up to the boundary but not over it."""
    for micro in window:
        loss = ctx.loss(engine, micro, label)
        backward(loss if owner is AccumulationOwner.ENGINE else loss / len(window))
        if owner is AccumulationOwner.ENGINE and micro != window[-1]:
            engine.step()


def judge_accumulation(ctx: JudgeContext) -> Iterator[Comparison]:
    for chosen, optimizer in OPTIMIZERS_BY_NAME.items():
        for steps in ACCUMULATION_STEPS[AccumulationOwner(ctx.variant)]:
            label = f"{chosen}-{steps}"
            if ctx.has_record(f"grads-{label}"):
                for boundary in range(NUM_BOUNDARIES):
                    yield from judge_boundary(ctx, label, boundary, steps)
                    moment = RecordedStep(boundary, f"masters-{label}", f"state-{label}")
                    grads = ctx.rank_records(f"grads-{label}", boundary)[0]
                    factor = yield from judge_clip_factor(ctx, f"norm-{label}", boundary, grads)
                    yield from judge_step(ctx, optimizer, grads, moment, factor)
                    after = RecordedStep(boundary + 1, moment.params_label, moment.state_label)
                    yield from compare_ranks_after_step(ctx, after)
                    yield from compare_published_weights(ctx, after, f"params-{label}")


def judge_clip_factor(
    ctx: JudgeContext, label: str, step: int, grads: Mapping[str, Tensor], limit: float = CLIP
) -> Generator[Comparison, None, ClipFactor]:
    """On every rank the norm recorded under ``label`` is that of all ``grads`` together; the factor by which
    torch.nn.utils.clip_grad_norm_ clips them to ``limit``, 1 where it does not.

    That an engine which clips reports none is told by training.clip_and_norm, which records it as NaN. What it clips by
    is then known as well as a norm is: DeepSpeed's stage 0 averages it over ranks, which rounds once more for each.
    """
    if not ctx.has_record(label):
        return NO_CLIPPING
    norm, error = total_norm_and_bound(grads)
    reported = yield from judge_reported_norm(ctx, label, step, norm, error)
    return ClipFactor.from_norm(limit, norm, error, reported)


def judge_reported_norm(
    ctx: JudgeContext, label: str, step: int, norm: Tensor, error: Tensor
) -> Generator[Comparison, None, Tensor | None]:
    """On every rank the norm recorded under ``label`` is ``norm``, within ``error``; rank 0's, if there is one."""
    reported = [copy.get("norm") for copy in ctx.rank_records(label, step)]
    for rank, each in enumerate(reported):
        if each is not None:
            yield hint_missing_norm(
                compare_within_bound(ctx.location("norm", Part.REDUCTION, step, rank), norm, each, error)
            )
    return reported[0]


def judge_engine_divided_gradients(
    ctx: JudgeContext,
    label: str,
    step: int,
    window: range,
    params: Mapping[str, Tensor],
    divided_locals: Sequence[Sequence[LocalResult]],
    exact: bool | Exactness = False,
) -> Iterator[Comparison]:
    """Gradients of the micro-steps ``window`` where the engine divides: the loss, as ``divided`` is, or the gradient.

    The undivided ones are computed only where the others do not fit. Where neither do, it is told of those with which
    more agrees: an engine that is wrong in one place is right in others.
    """
    by_loss = partial(ctx.compare_reduced_grads, label, divided_locals, step, exact, scale=len(window))
    found = list(stop_at_first_mismatch(by_loss(explain=False)))
    if count_matches(found) == len(found):
        yield from found
        return
    by_gradient = partial(
        ctx.compare_reduced_grads, label, [ctx.compute_local_grads(micro, params) for micro in window], step, exact
    )
    found = list(stop_at_first_mismatch(by_gradient(explain=False)))
    if count_matches(found) < len(found):
        found = max(list(by_gradient()), list(by_loss()), key=count_matches)
    yield from found


def count_matches(comparisons: Sequence[Comparison]) -> int:
    """In how many comparisons nothing is wrong."""
    return sum(comparison.mismatch is None for comparison in comparisons)


def judge_boundary(ctx: JudgeContext, label: str, boundary: int, steps: int) -> Iterator[Comparison]:
    """One boundary's gradients. An engine that owns the division may divide the loss or the gradient: both are right,
    and by anything but a power of two they round apart, so it has to match one of the two throughout.
    """
    window = range(boundary * steps, (boundary + 1) * steps)
    params: Mapping[str, Tensor] = ctx.rank_records(f"params-{label}", boundary)[0]
    divided = [ctx.compute_local_grads(micro, params, weigh=divide_loss_by(steps)) for micro in window]
    for micro, local in zip(window, divided, strict=True):
        yield from ctx.compare_losses(micro, local, f"loss-{label}")
    exact = ctx.certify_exactness(window) and (boundary == 0 or label.startswith("frozen"))
    if ctx.variant == AccumulationOwner.ENGINE.value:
        yield from judge_engine_divided_gradients(ctx, f"grads-{label}", boundary, window, params, divided, exact)
    else:
        yield from ctx.compare_reduced_grads(f"grads-{label}", divided, boundary, exact, scale=steps)
