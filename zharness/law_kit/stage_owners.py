"""Judge which ranks of a pipeline own each weight: those of its stages in the plan, along every other axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import Spans, list_owned_spans
from zharness.law_kit.owners import count_owners, judge_owners, mark_owners
from zharness.law_kit.rank_context import scalar
from zharness.mesh import PIPELINE
from zharness.parity import Comparison, Part, compare_bitwise

IN_STAGES = "this is the number of coordinates of pp whose ranks own a part of the weight by layout()"
IN_ORDER = "this is the coordinate of pp whose ranks own the weight by layout(); the first stages go up along pp"


def find_stages(ctx: JudgeContext, name: str, elements: int) -> set[int]:
    """Return the coordinates on pp of the ranks that own a part of a parameter."""
    return {get_stage(ctx, rank) for rank in range(ctx.world_size) if list_owned_spans(ctx, rank, name, elements)}


def get_stage(ctx: JudgeContext, rank: int) -> int:
    """Return the coordinate of ``rank`` on pp."""
    return ctx.mesh.coordinates(rank, ctx.world_size)[PIPELINE]


def judge_owners_of_stages(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that a weight lies on the stages of its modules in the plan, and there along every other axis as it has to.

    A weight lies on one coordinate of pp, or, if several modules of the plan have it, on one for each of them at most.
    Each of its elements lies on all of these.
    """
    weights = ctx.rank_records("weights")[0]
    uses = count_uses(ctx)
    stages = {name: find_stages(ctx, name, tensor.numel()) for name, tensor in weights.items()}
    along = {name: min(max(len(found), 1), uses[name]) for name, found in stages.items()}
    zero_stage = find_zero_stage(ctx, weights, along)
    for name, tensor in weights.items():
        counts = {**count_owners(ctx, zero_stage, name, tensor.shape), PIPELINE: along[name]}
        yield from judge_owners(ctx, name, tensor.numel(), list_spans(ctx, name, tensor), counts)
        found = scalar(len(stages[name]))
        comparison = compare_bitwise(ctx.location(name, Part.GATHER), scalar(along[name]), found)
        yield add_hint(comparison, f"{IN_STAGES}: {', '.join(map(str, sorted(stages[name])))}")
    yield from judge_order(ctx, stages)


def count_uses(ctx: JudgeContext) -> Mapping[str, int]:
    """Return how many modules of the plan have each parameter; a module that the plan names twice counts twice."""
    model = ctx.baseline.build_module()
    users = Counter(id(param) for name in ctx.baseline.spec.pp_plan for param in model.get_submodule(name).parameters())
    return {name: users[id(param)] for name, param in model.named_parameters()}


def find_zero_stage(ctx: JudgeContext, weights: Mapping[str, Tensor], along: Mapping[str, int]) -> int:
    """Return the ZeRO stage whose owners the weights have: the cell's, or 1 if a stage 0 has the owners of shards.

    A pipeline may wrap its stages in fully_shard at stage 0, too. Then no element has more owners than a shard has.
    """
    stage = int(ctx.rank_records("stage")[0]["stage"])
    for name, tensor in weights.items():
        counts = {**count_owners(ctx, 1, name, tensor.shape), PIPELINE: along[name]}
        _, owners = mark_owners(tensor.numel(), list_spans(ctx, name, tensor))
        if float(owners.sum(dim=0).max()) > math.prod(counts.values()):
            return stage
    return max(stage, 1)


def list_spans(ctx: JudgeContext, name: str, tensor: Tensor) -> list[Spans]:
    """Return the elements of a weight that each rank owns."""
    return [list_owned_spans(ctx, rank, name, tensor.numel()) for rank in range(ctx.world_size)]


def judge_order(ctx: JudgeContext, stages: Mapping[str, set[int]]) -> Iterator[Comparison]:
    """Check that the first stage of each coordinate of pp follows in the plan that of the coordinate before it."""
    model = ctx.baseline.build_module()
    names = {id(param): name for name, param in model.named_parameters()}
    reached = -1
    for module in ctx.baseline.spec.pp_plan:
        for param in model.get_submodule(module).parameters():
            name = names[id(param)]
            first = min(stages[name], default=0)
            place = ctx.location(name, Part.GATHER)
            yield add_hint(compare_bitwise(place, scalar(min(first, reached + 1)), scalar(first)), IN_ORDER)
            reached = max(reached, first)
