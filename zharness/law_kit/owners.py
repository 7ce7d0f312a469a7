"""Compute by how many ranks of a mesh each element of a master weight has to be owned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.observed_collectives import split_shapes
from zharness.law_kit.other_norms import is_of_expert, list_axes
from zharness.mesh import CONTEXT, DATA_SHARD, EXPERT, TENSOR


def count_owners(ctx: JudgeContext, stage: int, name: str, shape: Sequence[int]) -> Mapping[str, int]:
    """Return, by axis, the number of ranks along it that own each element of a master weight.

    From stage 1 on the ranks of dp_shard and cp have a shard each. Those of tp have a part each of a weight that the
    plan splits, and those of ep of the experts, which stages from 1 on shard over the ranks that have the same ones.
    The axis of experts divides the ranks of dp_shard, so that the product over all other axes is the number of owners.
    """
    sizes, experts = ctx.mesh.shape(ctx.world_size), ctx.mesh.size(EXPERT)
    spec = ctx.baseline.spec
    plan = {module: word for module, word in spec.tp_plan.items() if word not in ctx.claims.whole_plan_words}
    is_split = split_shapes({name: shape}, plan, sizes[TENSOR])[name] != tuple(shape)
    of_tensor = {TENSOR: 1} if is_split else {}
    if stage:
        return {**sizes, **of_tensor, DATA_SHARD: 1, CONTEXT: 1, EXPERT: 1}
    if is_of_expert(ctx, name):
        return {**sizes, **of_tensor, DATA_SHARD: sizes[DATA_SHARD] // experts, EXPERT: 1}
    return {**sizes, **of_tensor, EXPERT: experts}


def iter_wrong_axes(ctx: JudgeContext, counts: Mapping[str, int], owners: Collection[int]) -> Iterator[str]:
    """Yield a sentence for each axis along which another number of ranks than ``counts`` has owns an element.

    ``owners`` are the ranks that own it.
    """
    for axis in list_axes(ctx):
        starts = [ctx.mesh.rank_at_start(axis, rank, ctx.world_size) for rank in owners]
        found = [starts.count(start) for start in starts] or [0]
        wrong = next((number for number in found if number != counts[axis]), None)
        if wrong is not None:
            yield f"{wrong} along {axis} instead of {counts[axis]}"
