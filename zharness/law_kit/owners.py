"""Compute by how many ranks of a mesh each element of a master weight has to be owned."""

from __future__ import annotations

from collections.abc import Sequence

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.observed_collectives import split_shapes
from zharness.law_kit.other_norms import is_of_expert
from zharness.mesh import CONTEXT, DATA_SHARD, EXPERT, TENSOR


def count_owners(ctx: JudgeContext, stage: int, name: str, shape: Sequence[int]) -> int:
    """Return the number of ranks that own each element of a master weight.

    From stage 1 on the ranks of dp_shard and cp have a shard each. Those of tp have a part each of a weight that the
    plan splits, and those of ep of the experts, which stages from 1 on shard over the ranks that have the same ones.
    """
    sizes = ctx.mesh.shape(ctx.world_size)
    spec = ctx.baseline.spec
    plan = {module: word for module, word in spec.tp_plan.items() if word not in ctx.claims.whole_plan_words}
    is_split = split_shapes({name: shape}, plan, sizes[TENSOR])[name] != tuple(shape)
    parts = sizes[TENSOR] if is_split else 1
    if stage:
        parts *= sizes[DATA_SHARD] * sizes[CONTEXT]
    elif is_of_expert(ctx, name):
        parts *= ctx.mesh.size(EXPERT)
    return ctx.world_size // parts
