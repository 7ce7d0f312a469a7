"""Define the law in which an engine returns this rank's shards of gradients, weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Feature, Piece
from zharness.engines.tensor_access import require_shard_access
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state
from zharness.laws.access.common import (
    STATE_KEYS,
    STATE_OPTIMIZERS,
    Kind,
    access_law,
    optimizer_weights,
    read_all,
    train_micro_batch,
    trained_names,
)
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.compare import check_names

OPTIMIZER = STATE_OPTIMIZERS["adam"]


def observe_read_shard(ctx: RankContext) -> None:
    """Read this rank's shards of one kind of tensor in the second step, and record the full tensors too."""
    engine, kind = ctx.build_engine(optimizer=OPTIMIZER), Kind(ctx.variant)
    access, names = require_shard_access(engine), trained_names(engine)
    train_micro_batch(ctx, engine, 0)
    engine.step()
    engine.zero_grad()
    train_micro_batch(ctx, engine, 1)
    if kind is Kind.GRAD:
        ctx.record("shards", read_all(names, access.read_grad_shard))
        ctx.record("full", engine.full_grads())
    elif kind is Kind.PARAM:
        ctx.record("shards", read_all(names, access.read_param_shard))
        ctx.record("full", optimizer_weights(engine))
    else:
        paths = [f"{name}/{key}" for name in names for key in STATE_KEYS[OPTIMIZER.name]]
        ctx.record("shards", read_all(paths, lambda path: access.read_optimizer_state_shard(*path.rsplit("/", 1))))
        state = flatten_optimizer_state(engine.full_optimizer_state())
        ctx.record("full", {path: state[path] for path in paths})
    engine.close()


def judge_read_shard(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each rank's shards with the elements that ``layout()`` assigns to it, followed by padding of zeros."""
    for rank, (full, shards) in enumerate(zip(ctx.rank_records("full"), ctx.rank_records("shards"), strict=True)):
        layout = ctx.evidence[rank].layout
        check_names(f"what rank {rank} reads as shards", full, {path: shards[path] for path in shards if path in full})
        for path, tensor in full.items():
            flat, name = tensor.flatten(), path.rsplit("/", 1)[0]
            owned = layout.get(name, (Piece(rank, 0, flat.numel()),))
            pieces = [flat[piece.start : piece.stop] for piece in owned if piece.rank == rank]
            expected = torch.cat([flat.new_empty(0), *pieces])
            shard, place = shards[path], ctx.location(path, Part.GATHER, 0, rank)
            count = torch.tensor(float(shard.numel()))
            longest = expected.numel() + ctx.world_size - 1
            yield compare_bitwise(place, count.clamp(expected.numel(), longest), count)
            if expected.numel() <= shard.numel():
                yield compare_bitwise(place, expected.to(shard.dtype), shard[: expected.numel()])


LAWS = (
    access_law(
        "read_shard",
        "a shard of a gradient, weight or state read by name holds the elements that layout() assigns to the rank",
        observe_read_shard,
        judge_read_shard,
        features=(Feature.SHARD_ACCESS,),
        variants=tuple(Variant(kind.value, compares_engine_with_itself=True) for kind in Kind),
        weights_stay_integers=False,
        kept_because="the only law that reads shards with the engine's own function",
    ),
)
