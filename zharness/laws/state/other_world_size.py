"""Define the law state.other_world_size: a checkpoint can be loaded on more or on fewer ranks than saved it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from zharness import torch_private as private
from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.laws.state.common import (
    RESHARD_OPTIMIZER,
    SAVE_STEP,
    judge_next_step,
    record_next_step,
    record_snapshot,
    train_steps,
)
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.compare import check_names

MORE, FEWER = "more", "fewer"  # whether more or fewer ranks load than saved
SAVED, LOADED = "saved", "loaded"
BUFFER = "seen"  # a buffer that has a different value on each rank
PARTS = {"params": Part.GATHER, "masters": Part.OPTIMIZER, "state": Part.OPTIMIZER, "facts": Part.OPTIMIZER}


def count_fewer_ranks(ctx: RankContext) -> int:
    """Return the size of the smaller world: one rank less, or the largest size below that mesh and options allow."""
    smallest = ctx.config.mesh.smallest_world
    options = [ctx.capabilities.engine_options[name] for name in ctx.setting.options]
    of_options = (math.lcm(option.world_size_factor, smallest * option.shard_factor) for option in options)
    factor = math.lcm(smallest, *of_options)
    return max(factor, (ctx.world_size - 1) // factor * factor)


def observe_other_world_size(ctx: RankContext) -> None:
    """Save on some ranks, and load on more or fewer of them. The other ranks wait.

    In the variant ``more``, the loaded engine makes a step on all ranks of the cell. The group of the smaller world is
    not destroyed, because torch's DeviceMesh keeps the group's name for later engines of the process. An engine of the
    smaller world may create further groups; afterwards all ranks have to give the next group the same name.
    """
    fewer = count_fewer_ranks(ctx)
    group = dist.new_group(list(range(fewer)))
    sizes = (fewer, ctx.world_size) if ctx.variant == MORE else (ctx.world_size, fewer)
    with shared_folder() as folder:
        for size, act in zip(sizes, (save, load), strict=True):
            if ctx.rank < size:
                with private.default_group(group) if size == fewer < ctx.world_size else nullcontext():
                    act(ctx, folder)
            private.agree_on_group_names(ctx.device)
    ctx.record("sizes", {name: torch.tensor(size) for name, size in zip((SAVED, LOADED), sizes, strict=True)})


def build_engine(ctx: RankContext) -> Engine:
    """Build an engine around the model with the buffer BUFFER."""
    model = ctx.spec.model(ctx.seed)
    model.register_buffer(BUFFER, torch.zeros(1))
    return ctx.build_engine_around(model, optimizer=RESHARD_OPTIMIZER)


def save(ctx: RankContext, folder: Path) -> None:
    """Train, give the buffer of each rank its own value, and record and save everything."""
    engine = build_engine(ctx)
    train_steps(ctx, engine, range(SAVE_STEP), "before")
    engine.module.get_buffer(BUFFER).fill_(ctx.rank + 1.0)
    record_snapshot(ctx, engine, SAVE_STEP, SAVED)
    ctx.record(f"buffers-{SAVED}", {BUFFER: engine.module.get_buffer(BUFFER)})
    engine.save(folder)
    engine.close()


def load(ctx: RankContext, folder: Path) -> None:
    """Load the checkpoint, and record what was loaded and torch's generator before and after the load."""
    engine = build_engine(ctx)
    ctx.record("generator", {"generator": torch.get_rng_state()}, 0)
    engine.load(folder)
    ctx.record("generator", {"generator": torch.get_rng_state()}, 1)
    ctx.record(f"buffers-{LOADED}", {BUFFER: engine.module.get_buffer(BUFFER)})
    if ctx.variant == MORE:
        record_next_step(ctx, engine, LOADED)
    else:
        record_snapshot(ctx, engine, SAVE_STEP, LOADED)
    engine.close()


def judge_other_world_size(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the tensors that each rank loaded bitwise with the saved ones, and judge the next step.

    A rank for which the checkpoint has no buffers gets those of rank 0. A load must not change torch's generator.
    """
    sizes = {name: int(size) for name, size in ctx.rank_records("sizes")[0].items()}
    saving, loading = (ctx.evidence[: sizes[name]] for name in (SAVED, LOADED))  # the other ranks recorded nothing
    for rank, evidence in enumerate(loading):
        for what, part in PARTS.items():
            saved, loaded = saving[0].get(f"{what}-{SAVED}", SAVE_STEP), evidence.get(f"{what}-{LOADED}", SAVE_STEP)
            check_names(f"{what} after the load", saved, loaded)
            for name, tensor in saved.items():
                yield compare_bitwise(ctx.location(name, part, SAVE_STEP, rank), tensor, loaded[name])
        owner = rank if rank < len(saving) and ctx.claims.refusal(Feature.RANK_BUFFERS) is None else 0
        buffers = (saving[owner].get(f"buffers-{SAVED}", 0), evidence.get(f"buffers-{LOADED}", 0))
        yield compare_bitwise(ctx.location(BUFFER, Part.GATHER, SAVE_STEP, rank), *(each[BUFFER] for each in buffers))
        before, after = (evidence.get("generator", time)["generator"] for time in range(2))
        yield compare_bitwise(ctx.location("generator", Part.FORWARD, SAVE_STEP, rank), before, after)
    if ctx.variant == MORE:
        yield from judge_next_step(ctx, LOADED)


LAWS = (
    Law(
        name="state.other_world_size",
        statement="a checkpoint loads bitwise on more and on fewer ranks, and the next step is plain PyTorch's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_other_world_size,
        judge=judge_other_world_size,
        features=(Feature.CHECKPOINT, Feature.WORLD_RESHARD, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        judges_split_sums=True,
        variants=(Variant(MORE), Variant(FEWER, compares_engine_with_itself=True)),
        mesh_support=MeshSupport.SMALLER_WORLDS,
        kept_because="the only law that loads on a different number of ranks than saved",
        needs_fresh_ranks=True,
    ),
)
