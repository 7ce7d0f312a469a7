"""Judge which ranks of a pipeline own each weight: the ranks of its stages in the plan, along every other axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import list_owned_spans
from zharness.law_kit.owners import count_owners, judge_owners
from zharness.law_kit.rank_context import scalar
from zharness.mesh import PIPELINE
from zharness.parity import Comparison, Part, compare_bitwise

IN_STAGES = "this is the number of coordinates of pp whose ranks own a part of the weight by layout()"
IN_ORDER = "this is the coordinate of pp whose ranks own the weight by layout(); the first stages go up along pp"
IN_MODULE = "this is a coordinate of pp whose ranks own a part of the weight by layout(); those of its modules do not"
OTHER_CLAIMS = (
    "so it is with shards, which the engine does not claim at stage 0 in this dtype (Capabilities.sharded_dtypes)",
    "so it is with whole weights, but the engine claims shards (Capabilities.sharded_dtypes)",
)  # of an engine that claims whole weights, and of one that claims shards


def find_stages(ctx: JudgeContext, name: str, elements: int) -> set[int]:
    """Return the coordinates on pp of the ranks that own a part of a parameter."""
    return {get_stage(ctx, rank) for rank in range(ctx.world_size) if list_owned_spans(ctx, rank, name, elements)}


def get_stage(ctx: JudgeContext, rank: int) -> int:
    """Return the coordinate of ``rank`` on pp."""
    return ctx.mesh.coordinates(rank, ctx.world_size)[PIPELINE]


def judge_owners_of_stages(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that each weight is on the stages of its modules in the plan, and that the right ranks of a stage own it.

    A weight is on one coordinate of pp. If several modules of the plan have the weight, it is on at most one coordinate
    for each module, and each of its elements is on all of these coordinates.
    """
    weights = ctx.rank_records("weights")[0]
    uses = list_uses(ctx)
    stages = {name: find_stages(ctx, name, tensor.numel()) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        along = min(max(len(stages[name]), 1), len(uses[name]))
        yield from judge_owners_along_stages(ctx, name, tensor, along)
        comparison = compare_bitwise(ctx.location(name, Part.GATHER), scalar(along), scalar(len(stages[name])))
        yield add_hint(comparison, f"{IN_STAGES}: {', '.join(map(str, sorted(stages[name])))}")
    yield from judge_order(ctx, uses, stages)
    yield from judge_modules(ctx, uses, stages)


def list_uses(ctx: JudgeContext) -> Mapping[str, Sequence[int]]:
    """Return which modules of the plan have each parameter, by their indices; the plan may name a module twice."""
    model = ctx.baseline.build_module()
    users: dict[int, list[int]] = {id(param): [] for param in model.parameters()}
    for index, module in enumerate(ctx.baseline.spec.pp_plan):
        for param in model.get_submodule(module).parameters():
            users[id(param)].append(index)
    return {name: users[id(param)] for name, param in model.named_parameters()}


def judge_owners_along_stages(ctx: JudgeContext, name: str, tensor: Tensor, along: int) -> Iterator[Comparison]:
    """Check the owners of a weight that lies on ``along`` coordinates of pp.

    At ZeRO stage 0 the ranks have copies or shards; the engine's claim says which, because ``layout()`` alone cannot
    tell which is right.
    """
    stage = int(ctx.rank_records("stage")[0]["stage"])
    claimed = int(stage > 0 or claims_shards(ctx))
    spans = [list_owned_spans(ctx, rank, name, tensor.numel()) for rank in range(ctx.world_size)]

    def judge(zero_stage: int) -> Iterator[Comparison]:
        """Compare the owners with the owners of copies (``zero_stage`` 0) or of shards (``zero_stage`` 1)."""
        counts = {**count_owners(ctx, zero_stage, name, tensor.shape), PIPELINE: along}
        return judge_owners(ctx, name, tensor.numel(), spans, counts)

    for comparison in judge(claimed):
        mismatch = comparison.mismatch
        if mismatch and stage == 0 and all(other.mismatch is None for other in judge(1 - claimed)):
            comparison = add_hint(comparison, f"{mismatch.hint}; {OTHER_CLAIMS[claimed]}")
        yield comparison


def claims_shards(ctx: JudgeContext) -> bool:
    """Return whether the engine claims that the ranks of a pipeline stage have shards even at ZeRO stage 0."""
    return any(DTYPES[name] is ctx.dtype for name in ctx.claims.sharded_dtypes)


def judge_order(
    ctx: JudgeContext, uses: Mapping[str, Sequence[int]], stages: Mapping[str, set[int]]
) -> Iterator[Comparison]:
    """Check that in the plan, each pp coordinate's first stage follows the first stage of the coordinate before it.

    A weight with one use tells where its module is. A tied weight may be listed at its first use, at its last use, or
    at both. So a module that has only tied weights may be the first module of the next coordinate.
    """
    places, reached = place_modules(uses, stages), -1
    for index in range(len(ctx.baseline.spec.pp_plan)):
        name, at = places.get(index, ("", reached + 1))
        if name:
            compared = compare_bitwise(ctx.location(name, Part.GATHER), scalar(min(at, reached + 1)), scalar(at))
            yield add_hint(compared, IN_ORDER)
        reached = max(reached, at)


def judge_modules(
    ctx: JudgeContext, uses: Mapping[str, Sequence[int]], stages: Mapping[str, set[int]]
) -> Iterator[Comparison]:
    """Check that a weight is only on pp coordinates where its modules are, as far as other weights locate them."""
    places = place_modules(uses, stages)
    for name, found in stages.items():
        own = {places[index][1] for index in uses[name] if index in places}
        if own and all(index in places for index in uses[name]):
            for at in sorted(found):
                right = at if at in own else min(own)
                yield add_hint(compare_bitwise(ctx.location(name, Part.GATHER), scalar(right), scalar(at)), IN_MODULE)


def place_modules(uses: Mapping[str, Sequence[int]], stages: Mapping[str, set[int]]) -> Mapping[int, tuple[str, int]]:
    """Return, by the index of a module of the plan, its first weight with one use and the weight's coordinate on pp."""
    places: dict[int, tuple[str, int]] = {}
    for name, indices in uses.items():
        if len(indices) == 1 and stages[name]:
            places.setdefault(indices[0], (name, min(stages[name])))
    return places
