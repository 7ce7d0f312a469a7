"""Define the law mesh.dropout: ranks of tp with whole activations draw one mask, and those with parts several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh import mesh_law
from zharness.mesh import TENSOR
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import Baseline, LocalResult, run_local
from zharness.parity.certificate import Exactness, certify_exactness
from zharness.workload.exact_heads import DROPOUTS, Dropout, DroppedHeads, keep_everything

RECOMPUTED = "recomputed"
SEQUENCE_DIM = 1
Masks = Mapping[str, Tensor]  # by the name of the dropout


def observe_dropout(ctx: RankContext) -> None:
    """Run forward and backward of a micro-batch, and record the masks that each dropout drew, and the gradients."""
    model = cast(DroppedHeads, ctx.spec.model(ctx.seed))
    if ctx.variant == RECOMPUTED:
        model.run_block = partial(checkpoint, use_reentrant=False)
    engine = ctx.build_engine_around(model, optimizer=UNIT_LR_SGD)
    ctx.train(engine, step=0)
    drawn = {name: cast(Dropout, engine.module.get_submodule(name)).masks for name in DROPOUTS}
    ctx.record("calls", {name: scalar(len(masks)) for name, masks in drawn.items()})
    ctx.record("first masks", {name: read_local(masks[0]) for name, masks in drawn.items()})
    ctx.record("last masks", {name: read_local(masks[-1]) for name, masks in drawn.items()})
    ctx.record("grads", engine.full_grads())
    engine.close()


def read_local(mask: Any) -> Tensor:
    """Return this rank's part of a mask, which may be a DTensor."""
    local: Tensor = mask.to_local() if hasattr(mask, "to_local") else mask
    return local


def judge_dropout(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the masks with each other, and losses and gradients bitwise with plain PyTorch's under the same masks.

    A mask of the whole activations is the one that plain PyTorch draws from the caller's generator. The masks of parts
    of the sequence must not all be equal; 2 masks of 16 elements each are so by chance in 1 of 2^32 cells.
    """
    local = []
    for at in range(ctx.data_size):
        ranks = [rank for rank in range(ctx.world_size) if ctx.data_coordinate(rank) == at]
        _, plain = run_with_masks(ctx.baseline, at, {})
        for rank in ranks:
            yield from judge_recomputation(ctx, rank)
        yield from judge_masks(ctx, ranks, plain)
        local.append(run_with_masks(ctx.baseline, at, join_masks(ctx, ranks))[0])
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=certify_any_mask(ctx))


def judge_recomputation(ctx: JudgeContext, rank: int) -> Iterator[Comparison]:
    """Check that each dropout ran once, or twice if it is recomputed, and drew the same mask."""
    calls, first = ctx.rank_records("calls")[rank], ctx.rank_records("first masks")[rank]
    for name, last in ctx.rank_records("last masks")[rank].items():
        place = ctx.location(f"mask of {name}", Part.LOCAL_GRADIENT, 0, rank)
        expected = 2 if ctx.variant == RECOMPUTED else 1
        yield add_hint(compare_bitwise(place, scalar(expected), calls[name]), "the number of calls of this dropout")
        yield add_hint(compare_bitwise(place, first[name], last), "the recomputation drew another mask")


def judge_masks(ctx: JudgeContext, ranks: Sequence[int], plain: Masks) -> Iterator[Comparison]:
    """Compare the masks of ranks that share a micro-batch: whole ones with ``plain``, parts with each other."""
    masks = [ctx.rank_records("first masks")[rank] for rank in ranks]
    for rank, record in zip(ranks, masks, strict=True):
        for name, whole in plain.items():
            if record[name].shape == whole.shape:
                place = ctx.location(f"mask of {name}", Part.FORWARD, 0, rank)
                yield add_hint(
                    compare_bitwise(place, whole, record[name]), "plain PyTorch draws another mask from this generator"
                )
        repeats = any(other is not record and are_equal_parts(other, record, plain) for other in masks)
        place = ctx.location("masks of parts", Part.FORWARD, 0, rank)
        hint = f"all masks of this part of the sequence are those of another rank along {TENSOR}"
        yield add_hint(compare_bitwise(place, scalar(0), scalar(float(repeats))), hint)


def are_equal_parts(other: Masks, record: Masks, plain: Masks) -> bool:
    """Return whether all masks of two ranks are equal, and are masks of parts."""
    return all(
        record[name].shape != whole.shape and torch.equal(other[name], record[name]) for name, whole in plain.items()
    )


def join_masks(ctx: JudgeContext, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Return the masks of the whole activations, from the ranks that share a micro-batch."""
    records = [ctx.rank_records("first masks")[rank] for rank in ranks]
    tokens = ctx.baseline.batch(0, 0).inputs.shape[SEQUENCE_DIM]
    return {
        name: mask
        if mask.shape[SEQUENCE_DIM] == tokens
        else torch.cat([record[name] for record in records], dim=SEQUENCE_DIM)
        for name, mask in records[0].items()
    }


def run_with_masks(baseline: Baseline, at: int, masks: Masks) -> tuple[LocalResult, Masks]:
    """Return the plain model's loss and gradients under ``masks``, or else under those that it draws, and its masks."""
    model = baseline.build_module()
    drops = {name: cast(Dropout, model.get_submodule(name)) for name in DROPOUTS}
    for name, mask in masks.items():
        drops[name].draw = partial(take_mask, mask)
    result = run_local(model, baseline.batch(at, 0), baseline.objective)
    return result, {name: drop.masks[0] for name, drop in drops.items()}


def take_mask(mask: Tensor, _activations: Tensor) -> Tensor:
    """Return ``mask``."""
    return mask


def certify_any_mask(ctx: JudgeContext) -> Exactness:
    """Return whether tier X applies under every mask: the largest one bounds the sums of all others."""
    spec = replace(ctx.baseline.spec, build=partial(DroppedHeads, keep_everything))
    return certify_exactness(replace(ctx.baseline, spec=spec), range(1), ctx.dtype)


LAWS = (
    mesh_law(
        "dropout",
        "dropout drops the same elements on all ranks that have the whole activations, and others on each part of them",
        observe_dropout,
        judge_dropout,
        models=("dropped_heads", "dropped_sequence"),
        variants=(Variant(), Variant(RECOMPUTED)),
        kept_because="the only law of random numbers on a mesh",
    ),
)
