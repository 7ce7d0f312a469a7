"""Define the law training.sgd_step: SGD subtracts the gradient from each weight, and layout() describes the shards.

The learning rate is 1. The engine must not change the process's global settings or random generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Piece
from zharness.law_kit.construction import is_dtensor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import ModelScope, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_actions import eval_mode, train_and_record_step
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import MODELS, variation_law
from zharness.mesh import DATA_SHARD, EXPERT, TENSOR, Mesh
from zharness.parity import Comparison, Part, compare_bitwise

EVAL_MICRO = 2  # the micro-batch of a forward without a backward


def observe_sgd_step(ctx: RankContext) -> None:
    """Make one step while the ranks' random generators differ, and record the shards of each rank before and after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.rank)
        ctx.record("switches", read_process_state(), 0)
        engine = ctx.build_engine(optimizer=UNIT_LR_SGD)
        ctx.record("switches", read_process_state(), 1)
        ctx.record("shards", collect_local_shards(engine, ctx.config.mesh), 0)
        with eval_mode(engine), torch.no_grad():
            ctx.loss(engine, EVAL_MICRO)
        ctx.record("switches", read_process_state(), 2)
        train_and_record_step(ctx, engine)
        ctx.record("shards", collect_local_shards(engine, ctx.config.mesh), 1)
        ctx.record("switches", read_process_state(), 3)
        engine.close()
        ctx.record("switches", read_process_state(), 4)


def collect_local_shards(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    """Return this rank's shards as flat tensors, by the name of the parameter.

    A shard is a DTensor, or a tensor whose shape differs from that of the full parameter. On tp, it may be a tp part
    that every data-parallel rank holds as a whole. Empty tensors are left out, because the parameter's elements are
    then stored elsewhere.
    """
    full_params = engine.full_params()
    named: dict[str, Any] = {name: p for name, p in engine.module.named_parameters() if name in full_params}
    shards = {name: p.to_local() if is_dtensor(p) else p for name, p in named.items()}
    return {
        name: shard.detach().flatten()
        for name, shard in shards.items()
        if is_dtensor(named[name])
        or (TENSOR not in mesh.axes and shard.numel() and shard.shape != full_params[name].shape)
    }


def judge_sgd_step(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the optimizer step, the process state, the layout and the contents of the shards."""
    yield from judge_step(ctx, UNIT_LR_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "masters"))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))
    yield from compare_process_state(ctx, "switches", range(5))
    yield from judge_layout_coverage(ctx)
    for step in range(2):
        yield from judge_shard_contents(ctx, step)


def judge_layout_coverage(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the layout assigns every element to as many ranks as the engine claims, and is equal on all ranks."""
    for name, weight in ctx.rank_records("masters")[0].items():
        layouts = [evidence.layout.get(name, ()) for evidence in ctx.evidence]
        for rank, pieces in enumerate(layouts):
            place = ctx.location(name, Part.GATHER, 0, rank)
            yield compare_bitwise(place, torch.tensor(1.0), torch.tensor(float(pieces == layouts[0])))
            if pieces:
                times = torch.zeros(weight.numel())
                for piece in pieces:
                    times[piece.start : piece.stop] += 1
                owners = float(times.max()) if int(times.max()) in list_owner_counts(ctx) else ctx.claims.replicas
                yield compare_bitwise(place, torch.full_like(times, owners), times)


def list_owner_counts(ctx: JudgeContext) -> set[int]:
    """Return how many ranks may own each element of a weight: one for each copy, or more if ranks hold it unsharded.

    tp splits a weight. If the engine does not know the word of the plan for a layer, the weight stays whole on all tp
    ranks. Without ZeRO, the data-parallel ranks that have an expert hold the whole expert.
    """
    replicas, shape = ctx.claims.replicas, ctx.mesh.shape(ctx.world_size)
    of_experts = {shape[DATA_SHARD] // ctx.mesh.size(EXPERT)} if EXPERT in ctx.mesh.axes else set()
    return {replicas, replicas * shape[TENSOR]} | of_experts


def judge_shard_contents(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Compare each rank's shard with the elements that the layout assigns to the rank.

    The shard may end in fewer than N elements of padding, where N is the world size.
    """
    weights = ctx.rank_records("masters", step)[0]
    for rank, record in enumerate(ctx.rank_records("shards", step)):
        for name, part in record.items():
            pieces = ctx.evidence[rank].layout.get(name, (Piece(rank, 0, weights[name].numel()),))
            own_pieces = [weights[name].flatten()[piece.start : piece.stop] for piece in pieces if piece.rank == rank]
            expected = torch.cat([weights[name].new_empty(0), *own_pieces])
            place = ctx.location(name, Part.GATHER, step, rank)
            count = torch.tensor(float(part.numel()))
            yield compare_bitwise(place, count.clamp(expected.numel(), expected.numel() + ctx.world_size - 1), count)
            if part.numel() >= expected.numel():
                yield compare_bitwise(place, expected.to(part.dtype), part[: expected.numel()])


LAWS = (
    variation_law(
        "sgd_step",
        "SGD at a learning rate of 1 subtracts the gradients; layout() is right; torch's global state is unchanged",
        observe_sgd_step,
        judge_sgd_step,
        models=MODELS,
        mesh_dtypes=("bf16",),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True, model_scope=ModelScope.ANY),),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that checks a rank's shards and its random generator",
        needs_fresh_ranks=True,
    ),
)
