"""Define the law mesh.dropout: ranks with the same whole activations draw the same masks, and gradients fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_actions import eval_mode, shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh import mesh_law
from zharness.mesh import CONTEXT, TENSOR
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import Baseline, LocalResult, run_local
from zharness.parity.certificate import Exactness, certify_exactness
from zharness.workload.exact_heads import DROPOUTS, Dropout, DroppedHeads, keep_everything

RECOMPUTED, MASKS, WINDOW = "recomputed", "masks", "masks_in_a_window"
MICRO_BATCHES = {"": 1, RECOMPUTED: 1, MASKS: 4, WINDOW: 4}  # by law variant
INTERRUPTED_AFTER = 1  # the micro-batch after which an evaluation and a load run
SEQUENCE_DIM = 1
Masks = Mapping[str, Tensor]  # by the name of the dropout


def observe_dropout(ctx: RankContext) -> None:
    """Run backwards, and record all masks that each dropout drew, and the gradients of the first backward.

    No step moves a weight: growing weights would make later numbers infinite, and masks do not depend on weights. In
    the variant ``masks_in_a_window``, all micro-batches belong to one window that the engine accumulates. In the
    variant ``masks``, each micro-batch is one step. In both variants an evaluation runs after the second micro-batch;
    in ``masks`` a save and a load follow, if the engine claims checkpoints.
    """
    model = cast(DroppedHeads, ctx.spec.model(ctx.seed))
    if ctx.variant == RECOMPUTED:
        model.run_block = partial(checkpoint, use_reentrant=False)
    count, is_window = MICRO_BATCHES[ctx.variant], ctx.variant == WINDOW
    window = {"accumulation_steps": count, "accumulation_owner": AccumulationOwner.ENGINE} if is_window else {}
    engine = ctx.build_engine_around(model, optimizer=ZERO_LR_SGD, **window)
    for micro in range(count):
        ctx.train(engine, micro)
        if micro == 0 and not is_window:
            ctx.record("grads", engine.full_grads())
        engine.step()
        if not is_window:
            engine.zero_grad()
        if micro == INTERRUPTED_AFTER:
            interrupt(ctx, engine, loads=not is_window and ctx.capabilities.refusal(Feature.CHECKPOINT) is None)
    drawn = {name: cast(Dropout, engine.module.get_submodule(name)).masks for name in DROPOUTS}
    ctx.record("masks", {name: torch.stack([read_local(mask) for mask in masks]) for name, masks in drawn.items()})
    engine.close()


def interrupt(ctx: RankContext, engine: Engine, loads: bool) -> None:
    """Run an evaluation; if ``loads`` is true, then save the engine and load this checkpoint."""
    with eval_mode(engine), torch.no_grad():
        ctx.batch(INTERRUPTED_AFTER).feed(engine)
    if loads:
        with shared_folder() as folder:
            engine.save(folder)
            engine.load(folder)


def read_local(mask: Any) -> Tensor:
    """Return this rank's part of a mask, which may be a DTensor."""
    local: Tensor = mask.to_local() if hasattr(mask, "to_local") else mask
    return local


def judge_dropout(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the masks in the variants MASKS and WINDOW, else the losses and gradients under the engine's masks."""
    groups = [ctx.mesh.list_ranks(at, ctx.world_size) for at in range(ctx.data_size)]
    if ctx.variant in (MASKS, WINDOW):
        for at, ranks in enumerate(groups):
            yield from judge_masks(ctx, at, ranks)
    else:
        yield from judge_under_masks(ctx, groups)


def judge_under_masks(ctx: JudgeContext, groups: Sequence[Sequence[int]]) -> Iterator[Comparison]:
    """Compare losses and gradients bitwise with plain PyTorch's under the engine's masks, without judging the masks.

    ``groups`` lists, for each micro-batch, the ranks that share it.
    """
    local = []
    for at, ranks in enumerate(groups):
        for rank in ranks:
            yield from judge_recomputation(ctx, rank)
        local.append(run_with_masks(ctx.baseline, at, 0, join_masks(ctx, ranks))[0])
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=certify_any_mask(ctx))


def judge_recomputation(ctx: JudgeContext, rank: int) -> Iterator[Comparison]:
    """Check that each dropout ran once, or twice if it is recomputed, and drew the same mask."""
    for name, masks in ctx.rank_records("masks")[rank].items():
        place = ctx.location(f"mask of {name}", Part.LOCAL_GRADIENT, 0, rank)
        expected = 2 if ctx.variant == RECOMPUTED else 1
        yield add_hint(
            compare_bitwise(place, scalar(expected), scalar(len(masks))), "the number of calls of this dropout"
        )
        yield add_hint(compare_bitwise(place, masks[0], masks[-1]), "the recomputation drew another mask")


def judge_masks(ctx: JudgeContext, at: int, ranks: Sequence[int]) -> Iterator[Comparison]:
    """Judge the masks of the ranks that share micro-batch ``at``: masks of whole activations, and masks of parts.

    A mask of the whole activations must equal the mask that plain PyTorch draws from the caller's generator. A mask of
    a part of a sequence must differ from all masks of other parts, in any step, and from the masks of its rank's other
    steps. Two masks of a part, which has at least 64 elements, are equal by chance in 1 of 2^64 cases. Masks of two
    steps are equal by chance in 1 of 2^30 cases, because the seeds of steps have 30 bits. A cell compares fewer than
    100 pairs of steps, so 1 of 10^7 cells fails by chance.
    """
    plain = draw_plain_masks(ctx.baseline, at)
    records = [ctx.rank_records("masks")[rank] for rank in ranks]
    axis = CONTEXT if CONTEXT in ctx.mesh.axes else TENSOR
    for rank, record in zip(ranks, records, strict=True):
        for name, masks in record.items():
            place = ctx.location(f"masks of {name}", Part.FORWARD, 0, rank)
            counts = scalar(len(plain[name])), scalar(len(masks))
            yield add_hint(compare_bitwise(place, *counts), "the number of forwards in which this dropout drew a mask")
            if masks.shape == plain[name].shape:
                hint = "plain PyTorch draws another mask from this generator"
                yield add_hint(compare_bitwise(place, plain[name], masks), hint)
                continue
            own = list_masks(masks)
            others = {mask for other in records if other is not record for mask in list_masks(other[name])}
            shared, repeated = sum(mask in others for mask in own), len(own) - len(set(own))
            for count, hint in (
                (shared, f"{shared} of {len(own)} masks of this part of the sequence are another rank's along {axis}"),
                (repeated, f"{repeated} of {len(own)} steps repeat a mask of an earlier step"),
            ):
                yield add_hint(compare_bitwise(place, scalar(0), scalar(float(count))), hint)


def list_masks(masks: Tensor) -> list[tuple[float, ...]]:
    """Return the elements of the mask of each step."""
    return [tuple(mask.flatten().tolist()) for mask in masks]


def draw_plain_masks(baseline: Baseline, at: int) -> Masks:
    """Return the masks that the plain model draws for micro-batch ``at`` of each step."""
    steps = [run_with_masks(baseline, at, step, {})[1] for step in range(MICRO_BATCHES[MASKS])]
    return {name: torch.stack([masks[name] for masks in steps]) for name in DROPOUTS}


def join_masks(ctx: JudgeContext, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Return each dropout's first mask of the whole activations, joined from the ranks that share a micro-batch."""
    records = [{name: masks[0] for name, masks in ctx.rank_records("masks")[rank].items()} for rank in ranks]
    tokens = ctx.baseline.batch(0, 0).inputs.shape[SEQUENCE_DIM]
    return {
        name: mask
        if mask.shape[SEQUENCE_DIM] == tokens
        else torch.cat([record[name] for record in records], dim=SEQUENCE_DIM)
        for name, mask in records[0].items()
    }


def run_with_masks(baseline: Baseline, at: int, step: int, masks: Masks) -> tuple[LocalResult, Masks]:
    """Return the plain model's loss and gradients, and its masks: ``masks``, or the masks that it draws if empty."""
    model = baseline.build_module()
    drops = {name: cast(Dropout, model.get_submodule(name)) for name in DROPOUTS}
    for name, mask in masks.items():
        drops[name].draw = partial(take_mask, mask)
    result = run_local(model, baseline.batch(at, step), baseline.objective)
    return result, {name: drop.masks[0] for name, drop in drops.items()}


def take_mask(mask: Tensor, _activations: Tensor) -> Tensor:
    """Return ``mask``."""
    return mask


def certify_any_mask(ctx: JudgeContext) -> Exactness:
    """Return whether tier X applies under every mask: the mask that keeps everything bounds the sums of all others."""
    # A class of models with dropout. Its argument is the function that draws masks.
    model: Any = ctx.baseline.spec.build
    spec = replace(ctx.baseline.spec, build=partial(model, keep_everything))
    return certify_exactness(replace(ctx.baseline, spec=spec), range(1), ctx.dtype)


LAWS = (
    mesh_law(
        "dropout",
        "ranks draw one dropout mask for whole activations, and different masks for parts, and gradients fit them",
        observe_dropout,
        judge_dropout,
        models=("dropped_heads", "dropped_sequence"),
        variants=(Variant(), Variant(RECOMPUTED), Variant(MASKS), Variant(WINDOW, (Feature.ENGINE_ACCUMULATION,))),
        kept_because="the only law of random numbers on a mesh",
    ),
)
