"""Define the law mesh.not_finite: a gradient that is infinite or NaN on one coordinate has one outcome on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from zharness.engines.protocol import Engine, Feature, Piece
from zharness.engines.tensor_access import require_shard_access
from zharness.law_kit.clipping import NO_CLIPPING, compute_clip_factor
from zharness.law_kit.hints import add_hint, hint_became_nan
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.training_run import total_norm
from zharness.laws.circumstances.not_finite import CLIPPED, Outcome, step_and_classify
from zharness.laws.mesh import CLIP, mesh_law
from zharness.parity import Comparison, Part, compare_bitwise, compare_ranks

VALUES = {"inf": math.inf, "nan": math.nan}


def observe_one_coordinate(ctx: RankContext) -> None:
    """Replace the last element of the first gradient, which only the last ranks own, and make a step.

    If callers cannot write the engine's shards, a hook on the parameter replaces the element in backward, on the last
    ranks.
    """
    clip = CLIP if ctx.variant.endswith(CLIPPED) else None
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, clip=clip)
    ctx.record_weights(engine, 0)
    name = next(iter(engine.full_params()))
    value = VALUES[ctx.variant.removesuffix(CLIPPED)]
    has_shards = ctx.capabilities.refusal(Feature.SHARD_ACCESS) is None
    if not has_shards:
        overflow_in_backward(ctx, engine, name, value)
    ctx.train(engine, step=0)
    grads = engine.full_grads()
    if has_shards:
        write_last_element(ctx, engine, name, grads[name].numel(), value)
        grads[name].view(-1)[-1] = value
    ctx.record("grads", grads)
    outcome = step_and_classify(engine)
    norm = engine.grad_norm() if clip is not None and outcome is Outcome.APPLIED else None
    ctx.record("outcome", {"outcome": scalar(outcome)} | ({} if norm is None else {"norm": scalar(norm)}))
    ctx.record_weights(engine, 1)
    engine.close()


def overflow_in_backward(ctx: RankContext, engine: Engine, name: str, value: float) -> None:
    """Set the last element of a local gradient to ``value``, on the ranks that are the last along each named axis."""
    mesh = ctx.config.mesh
    places = mesh.coordinates(ctx.rank, ctx.world_size)

    def overflow(grad: Tensor) -> Tensor:
        """Return the gradient with the value as its last element."""
        changed = grad.clone()
        changed.view(-1)[-1] = value
        return changed

    if all(places[axis] == mesh.size(axis) - 1 for axis in mesh.axes):
        dict(engine.module.named_parameters())[name].register_hook(overflow)  # type: ignore[no-untyped-call]


def write_last_element(ctx: RankContext, engine: Engine, name: str, elements: int, value: float) -> None:
    """Write the last element of a gradient through the shards of the ranks that own the element."""
    shards = require_shard_access(engine)
    shard = shards.read_grad_shard(name)
    pieces = engine.layout().get(name, (Piece(ctx.rank, 0, elements),))
    if any(piece.rank == ctx.rank and piece.stop == elements for piece in pieces):
        shard[-1] = value
    shards.write_grad_shard(name, shard)


def judge_one_coordinate(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the outcomes of all ranks, and the weights with torch's SGD, or with those before a refused step.

    Exactly one gradient must not be finite; otherwise the law has tested nothing.
    """
    for rank, grads in enumerate(ctx.rank_records("grads")):
        overflowed = [name for name, grad in grads.items() if not grad.isfinite().all()]
        place = ctx.location("gradients that are not finite", Part.ACCUMULATION, 0, rank)
        yield compare_bitwise(place, scalar(1), scalar(len(overflowed)))
    yield from compare_ranks(
        ctx.location("outcome", Part.OPTIMIZER), [r["outcome"] for r in ctx.rank_records("outcome")]
    )
    expected = compute_stepped_weights(ctx)
    for rank, (record, weights) in enumerate(
        zip(ctx.rank_records("outcome"), ctx.rank_records("params", 1), strict=True)
    ):
        if "norm" in record:
            place = ctx.location("finiteness of norm", Part.REDUCTION, 0, rank)
            comparison = compare_bitwise(place, scalar(False), record["norm"].isfinite().double())
            yield add_hint(comparison, "this rank has the norm of the elements that are finite")
        for name, weight in expected.items():
            yield hint_became_nan(compare_bitwise(ctx.location(name, Part.OPTIMIZER, 0, rank), weight, weights[name]))


def compute_stepped_weights(ctx: JudgeContext) -> dict[str, Tensor]:
    """Return the weights that every rank must have after the step, given the outcome on rank 0."""
    before, grads = ctx.rank_records("params", 0)[0], ctx.rank_records("grads")[0]
    if ctx.rank_records("outcome")[0]["outcome"] != Outcome.APPLIED:
        return dict(before)
    factor = compute_clip_factor(CLIP, total_norm(grads)) if ctx.variant.endswith(CLIPPED) else NO_CLIPPING.value
    return {name: weight.double() - grads[name].double() * factor for name, weight in before.items()}


LAWS = (
    mesh_law(
        "not_finite",
        "all ranks apply, all skip or all refuse a gradient that is infinite or NaN on one coordinate alone",
        observe_one_coordinate,
        judge_one_coordinate,
        models=("exact", "sequence", "routed"),
        variants=tuple(
            Variant(f"{value}{suffix}", (Feature.CLIP,) if suffix else ())
            for value in VALUES
            for suffix in ("", CLIPPED)
        ),
        kept_because="the only law of a gradient that is not finite on only some ranks",
    ),
)
