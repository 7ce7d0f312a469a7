"""Define the law pipeline.dropout: each stage draws separate masks for each micro-batch, and gradients fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.errors import RoundedScenarioError
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import MeshSupport, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.pipeline import (
    DEFAULT_SHAPE,
    MICRO_BATCHES,
    SCHEDULES,
    compare_micro_losses,
    pipeline_law,
    run_batch,
    select_schedule,
    train_batch,
)
from zharness.mesh import TENSOR, Mesh
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import LocalResult, run_local
from zharness.parity.certificate import Exactness, certify_exactness
from zharness.workload.exact_chain import PIPELINE_PLAN, DroppedBlock
from zharness.workload.exact_heads import keep_everything
from zharness.workload.generators import fork_seeded_generators

RECOMPUTED = "_recomputed"
FIRST = 1  # the number of the first batch, in which a schedule may run forwards to infer shapes


def list_blocks(model: nn.Module) -> dict[str, DroppedBlock]:
    """Return the blocks of a model with dropout by name."""
    return {name: cast(DroppedBlock, model.get_submodule(name)) for name in PIPELINE_PLAN}


def observe_dropout(ctx: RankContext) -> None:
    """Run two batches, and record losses, gradients and the masks of each dropout in the second batch.

    The caller seeds torch's generator differently on each rank, but equally along tp, whose ranks share activations.
    """
    model = ctx.spec.model(ctx.seed)
    blocks = list_blocks(model)
    for block in blocks.values() if ctx.variant.endswith(RECOMPUTED) else ():
        block.run_block = partial(checkpoint, use_reentrant=False)
    options = select_schedule(ctx.variant.removesuffix(RECOMPUTED))
    engine = ctx.build_engine_around(model, optimizer=ZERO_LR_SGD, options=options)
    with fork_seeded_generators(ctx.seed + find_first_replica(ctx.config.mesh, ctx.rank, ctx.world_size)):
        train_batch(ctx, engine, FIRST, DEFAULT_SHAPE)
        engine.step()
        engine.zero_grad()
        earlier = {name: torch.stack(block.drop.masks) for name, block in blocks.items() if block.drop.masks}
        ctx.record("earlier", earlier)
        for block in blocks.values():
            block.drop.forget()
        run_batch(ctx, engine, 0)
    drops = {name: block.drop for name, block in blocks.items() if block.drop.masks}
    ctx.record("masks", {name: torch.stack(drop.masks) for name, drop in drops.items()})
    ctx.record("inputs", {name: torch.stack(drop.inputs) for name, drop in drops.items()})
    engine.close()


def find_first_replica(mesh: Mesh, rank: int, world_size: int) -> int:
    """Return the first rank along tp with the same stages and micro-batches as ``rank``."""
    return mesh.rank_at_start(TENSOR, rank, world_size)


@dataclass(frozen=True)
class DrawnMasks:
    """The masks that the dropout of a block drew, each with the activations to which it was applied."""

    inputs: Sequence[Tensor]
    masks: Sequence[Tensor]

    def group(self) -> list[list[Tensor]]:
        """Return the masks of each micro-batch: several masks if the forward was recomputed."""
        groups: list[tuple[Tensor, list[Tensor]]] = []
        for activations, mask in zip(self.inputs, self.masks, strict=True):
            found = next((masks for seen, masks in groups if torch.equal(seen, activations)), None)
            if found is None:
                groups.append((activations, [mask]))
            else:
                found.append(mask)
        return [masks for _, masks in groups]

    def find(self, activations: Tensor) -> Tensor:
        """Return the first mask for these activations, or zeros, which give another loss, if there is no mask."""
        pairs = zip(self.inputs, self.masks, strict=True)
        return next((mask for seen, mask in pairs if torch.equal(seen, activations)), torch.zeros_like(activations))


def read_masks(ctx: JudgeContext, rank: int) -> dict[str, DrawnMasks]:
    """Return the masks that each dropout in the stages of ``rank`` drew, by the name of its block."""
    inputs, masks = ctx.rank_records("inputs")[rank], ctx.rank_records("masks")[rank]
    return {name: DrawnMasks(list(inputs[name]), list(masks[name])) for name in masks}


def judge_dropout(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the masks, and compare losses and gradients bitwise with plain PyTorch's under these masks.

    Raises RoundedScenarioError if tp, which splits sums, could round a sum.
    """
    exact = certify_any_mask(ctx)
    if TENSOR in ctx.mesh.axes and not exact:
        raise RoundedScenarioError("a sum of a batch is rounded under some mask, so tp cannot be judged by it")
    drawn = [read_masks(ctx, rank) for rank in range(ctx.world_size)]
    for rank, blocks in enumerate(drawn):
        for name, masks in blocks.items():
            yield from judge_masks(ctx, drawn, rank, name, masks.group())
    micros = [[run_with_masks(ctx, at, micro, drawn) for at in range(ctx.data_size)] for micro in range(MICRO_BATCHES)]
    yield from compare_micro_losses(ctx, micros)
    yield from ctx.compare_reduced_grads("grads", micros, exact=exact)


def judge_masks(
    ctx: JudgeContext, drawn: Sequence[Mapping[str, DrawnMasks]], rank: int, name: str, groups: list[list[Tensor]]
) -> Iterator[Comparison]:
    """Check one dropout's masks: one per micro-batch, different from those of other micro-batches, blocks and ranks.

    The masks must also differ from those of the previous batch. Ranks along tp hold the whole activations, and must
    draw the same mask. Two masks of 64 elements are equal by chance in 1 of 2^64 cases, and a cell compares fewer than
    1,000 pairs.
    """
    place = ctx.location(f"masks of {name}", Part.FORWARD, 0, rank)
    own = [list_elements(masks[0]) for masks in groups]
    first = find_first_replica(ctx.mesh, rank, ctx.world_size)
    whole = {list_elements(mask) for mask in drawn[first][name].masks}
    others = {
        list_elements(mask)
        for other_rank, blocks in enumerate(drawn)
        for other_name, masks in blocks.items()
        if (find_first_replica(ctx.mesh, other_rank, ctx.world_size), other_name) != (first, name)
        for mask in masks.masks
    }
    earlier = {
        list_elements(mask) for record in ctx.rank_records("earlier") for masks in record.values() for mask in masks
    }
    changed = sum(any(not torch.equal(masks[0], mask) for mask in masks[1:]) for masks in groups)
    again = sum(mask in earlier for mask in own)
    repeated, shared = len(own) - len(set(own)), sum(mask in others for mask in own)
    apart = sum(mask not in whole for mask in own)
    for wanted, count, hint in (
        (MICRO_BATCHES, len(own), "the number of micro-batches that this dropout saw"),
        (0, changed, f"the recomputation of {changed} micro-batches drew another mask"),
        (0, repeated, f"{repeated} of {len(own)} micro-batches repeat the mask of an earlier one"),
        (0, shared, f"{shared} of {len(own)} masks are those of another block, micro-batch or rank"),
        (0, again, f"{again} of {len(own)} masks are those of the batch before"),
        (
            0,
            apart,
            f"{apart} of {len(own)} masks are not those of rank {first}, which has the same activations along tp",
        ),
    ):
        yield add_hint(compare_bitwise(place, scalar(wanted), scalar(count)), hint)


def list_elements(mask: Tensor) -> tuple[float, ...]:
    """Return the elements of a mask."""
    return tuple(mask.flatten().tolist())


def run_with_masks(ctx: JudgeContext, at: int, micro: int, drawn: Sequence[Mapping[str, DrawnMasks]]) -> LocalResult:
    """Return the plain model's loss and gradients of a micro-batch under the masks that the ranks drew for it."""
    model = ctx.baseline.build_module()
    found = [drawn[rank] for rank in ctx.mesh.list_ranks(at, ctx.world_size)]
    for name, block in list_blocks(model).items():
        masks = next((blocks[name] for blocks in found if name in blocks), DrawnMasks((), ()))
        block.drop.draw = masks.find
    return run_local(model, ctx.baseline.batch(at, micro), ctx.baseline.objective)


def certify_any_mask(ctx: JudgeContext) -> Exactness:
    """Return whether tier X applies under every mask: the mask that keeps everything bounds the sums of all others."""
    # A class of models with dropout. Its argument is the function that draws masks.
    model: Any = ctx.baseline.spec.build
    spec = replace(ctx.baseline.spec, build=partial(model, keep_everything))
    return certify_exactness(replace(ctx.baseline, spec=spec), range(MICRO_BATCHES), ctx.dtype)


_LAW = pipeline_law(
    "dropout",
    "each stage draws a new dropout mask for each micro-batch, which a recomputation repeats, and gradients fit it",
    observe_dropout,
    judge_dropout,
    tuple(
        Variant(f"{name}{suffix}", schedules=(name,), micro_batches=MICRO_BATCHES)
        for suffix in ("", RECOMPUTED)
        for name in SCHEDULES
    ),
    models=("dropped_chain",),
    kept_because="the only law of random numbers and of recomputation in a pipeline",
)

LAWS = (replace(_LAW, mesh_support=MeshSupport.ONE_COORDINATE_BESIDE_TP),)
