"""Define the law mesh.loss_scale: after an overflow on one rank, all ranks have equal loss scales and old weights.

The laws of the group ``precision`` judge the value of the scale. An engine may have one torch GradScaler on each rank,
and a GradScaler looks for an overflow only in the gradients of its own rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Absent, Engine, Feature
from zharness.errors import EngineContractError
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh import mesh_law
from zharness.laws.precision.common import SGD
from zharness.laws.precision.grad_scaler import SCALER_SETTINGS, BadColumnGrad, Overflow, run_overflowing_forward
from zharness.mesh import AXES, REPLICATE, TENSOR
from zharness.parity import Comparison, Part, compare_bitwise, compare_ranks

ON_THE_LAST, GOOD, ON_THE_FIRST, GOOD_AGAIN = STEPS = range(4)
OVERFLOWS = (ON_THE_LAST, ON_THE_FIRST)
FP16, AUTOCAST = "fp16", "autocast"


def observe_scale(ctx: RankContext) -> None:
    """Make a step that overflows on the last rank alone and one on the first rank alone, each before a good step.

    An engine that checks one rank only would detect one of the two overflows. Scales and weights are recorded.
    """
    engine = ctx.build_engine(optimizer=SGD, options=SCALER_SETTINGS[ctx.variant].options)
    overflowing = {ON_THE_LAST: ctx.world_size - 1, ON_THE_FIRST: 0}
    for step in STEPS:
        ctx.record_weights(engine, step)
        backward_with_overflow(ctx, engine, step, overflowing.get(step) == ctx.rank)
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        scale = engine.observe().loss_scale
        if isinstance(scale, Absent):
            raise EngineContractError(f"the engine claims a loss scaler, and reports no loss scale: {scale.reason}")
        ctx.record("scale", {"scale": scalar(scale)}, step)
    ctx.record_weights(engine, len(STEPS))
    engine.close()


def backward_with_overflow(ctx: RankContext, engine: Engine, step: int, overflows: bool) -> None:
    """Run forward and backward; if ``overflows``, make a part of this rank's gradients infinite, and nothing else.

    Under torch_autocast, if an axis splits the model, a hook makes a part overflow that only this rank holds. In fp16,
    and with copies of weights alone, the forward makes the gradients overflow, because no hook sees gradients of
    sharded weights.
    """
    factor = 1 / SCALER_SETTINGS[ctx.variant].initial  # small enough that nothing else overflows
    if ctx.variant == FP16 or set(ctx.config.mesh.axes) == {REPLICATE}:
        batch, part = ctx.batch(step), Overflow.PART if overflows else Overflow.NONE
        output = run_overflowing_forward(engine, batch.inputs, part, ctx.variant)
        ctx.backward(engine, ctx.spec.loss(output, batch.target), step, factor=factor)
        return
    is_split = TENSOR in ctx.config.mesh.axes
    hooks = [overflow_one_column(engine.module, 0 if ctx.rank == 0 else -1)] if overflows and is_split else []
    loss = ctx.loss(engine, step)
    hooks += [overflow_one_matrix(engine.module)] if overflows and not is_split else []
    ctx.backward(engine, loss, step, factor=factor)
    for hook in hooks:
        hook.remove()


def overflow_one_column(module: nn.Module, column: int) -> torch.utils.hooks.RemovableHandle:
    """Make the gradient of a column of the first layer's output infinite, and so the same row of its weight's gradient.

    ``tp`` gives the first row to the first rank and the last row to the last rank. A hook on the weight would not be
    called if the engine also shards the weight.
    """

    def overflow(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """Return a copy of the output whose gradient is infinite in the column."""
        return cast(Tensor, BadColumnGrad.apply(output, torch.inf, column))  # type: ignore[no-untyped-call]

    return module.get_submodule("first").register_forward_hook(overflow)


def overflow_one_matrix(module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Make the gradient of one matrix infinite: of an expert if the model has experts, else of the first layer."""
    weights = {name: param for name, param in module.named_parameters() if name.endswith("weight")}
    chosen = next((param for name, param in weights.items() if "experts." in name), weights["first.weight"])
    handle: torch.utils.hooks.RemovableHandle = chosen.register_hook(  # type: ignore[no-untyped-call]
        partial(torch.full_like, fill_value=torch.inf)
    )
    return handle


def judge_scale(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the loss scale between ranks after each step, and the weights after an overflow with those before it.

    In a step with an overflow, every rank must have a gradient that is not finite; in a good step, all gradients must
    be finite. Otherwise the law has tested nothing.
    """
    for step in STEPS:
        yield from compare_finiteness(ctx, step)
        scales = [float(record["scale"]) for record in ctx.rank_records("scale", step)]
        positive = all(0 < scale < math.inf for scale in scales)
        yield compare_bitwise(
            ctx.location("positive loss scales", Part.OPTIMIZER, step), scalar(True), scalar(positive)
        )
        for comparison in compare_ranks(ctx.location("loss scale", Part.OPTIMIZER, step), [*map(scalar, scales)]):
            axes = " and ".join(find_unequal_axes(ctx, scales))
            yield add_hint(comparison, f"ranks along {axes} have loss scales of their own")
        yield from (compare_skipped_weights if step in OVERFLOWS else compare_moved_weights)(ctx, step)


def compare_finiteness(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Check on every rank that the gradients of ``step`` are finite exactly if the step has no overflow."""
    finite = [all(bool(grad.isfinite().all()) for grad in grads.values()) for grads in ctx.rank_records("grads", step)]
    for rank, found in enumerate(finite):
        place = ctx.location("finiteness of gradients", Part.REDUCTION, step, rank)
        yield add_hint(
            compare_bitwise(place, scalar(step not in OVERFLOWS), scalar(found)), describe_ranks(ctx, finite)
        )


def compare_skipped_weights(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Compare the weights of each rank after a step with an overflow with its weights before the step."""
    before, after = ctx.rank_records("params", step), ctx.rank_records("params", step + 1)
    for name in before[0]:
        pairs = [(old[name], new[name]) for old, new in zip(before, after, strict=True)]
        ranks = describe_ranks(ctx, [torch.equal(old, new) for old, new in pairs])
        for rank, (old, new) in enumerate(pairs):
            comparison = compare_bitwise(ctx.location(name, Part.OPTIMIZER, step, rank), old, new)
            yield add_hint(comparison, f"a step with an overflow changed it{ranks and f', {ranks}'}")


def compare_moved_weights(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Check that a good step moved weights, and compare the weights of all ranks after the step with each other."""
    before, after = ctx.rank_records("params", step)[0], ctx.rank_records("params", step + 1)
    moved = any(not torch.equal(weight, after[0][name]) for name, weight in before.items())
    yield compare_bitwise(ctx.location("moved weights", Part.OPTIMIZER, step), scalar(True), scalar(moved))
    for name in before:
        yield from compare_ranks(ctx.location(name, Part.OPTIMIZER, step), [weights[name] for weights in after])


def describe_ranks(ctx: JudgeContext, answers: Sequence[bool]) -> str:
    """Return a text that names the axes along which ``answers`` of ranks differ, or '' if all are equal."""
    axes = " and ".join(find_unequal_axes(ctx, answers))
    return f"on some of the ranks along {axes} alone" if axes else ""


def find_unequal_axes(ctx: JudgeContext, values: Sequence[float]) -> list[str]:
    """Return the axes along which some rank has a different value than the first rank of the axis."""

    def is_unequal(axis: str) -> bool:
        """Return whether a value differs along ``axis``."""
        first = [ctx.mesh.rank_at_start(axis, rank, ctx.world_size) for rank in range(ctx.world_size)]
        return any(value != values[start] for value, start in zip(values, first, strict=True))

    return [axis for axis in ctx.mesh.axes if is_unequal(axis)] or [axis for axis in AXES if is_unequal(axis)]


LAWS = (
    mesh_law(
        "loss_scale",
        "after an overflow on one rank alone, no rank's weights change, and all ranks have the same loss scale",
        observe_scale,
        judge_scale,
        models=("mixed",),
        variants=(Variant(FP16, (Feature.LOSS_SCALER,)), Variant(AUTOCAST, (Feature.AUTOCAST_SCALER,))),
        kept_because="the only law that compares loss scales along the axes of a mesh",
    ),
)
