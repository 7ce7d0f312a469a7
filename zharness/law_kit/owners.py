"""Judge which ranks of a mesh own each element of a master weight, by their coordinates along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.observed_collectives import split_shapes
from zharness.law_kit.other_norms import Spans, is_of_expert, list_axes
from zharness.mesh import AXES, CONTEXT, DATA_SHARD, EXPERT, PIPELINE, TENSOR
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.comparison import TensorLocation

OWNERS = "this is the number of ranks that own the element by layout()"
CUT_ALONE = (PIPELINE, TENSOR)  # the ranks at each coordinate of these axes shard the elements that they have


def count_owners(ctx: JudgeContext, stage: int, name: str, shape: Sequence[int]) -> Mapping[str, int]:
    """Return, for each axis, at how many coordinates ranks own an element of a master weight: at one, or at all.

    From stage 1 on, each rank of dp_shard and cp has one shard. Each rank of tp has one part of a weight that the plan
    splits. Each rank of ep has a part of the experts; from stage 1 on, these experts are sharded over the ranks that
    have the same experts. The owners are all combinations of these coordinates. On a mesh with ep, a coordinate of
    dp_shard is a group of ranks (``measure_axes``).
    """
    sizes = measure_axes(ctx)
    spec = ctx.baseline.spec
    plan = {module: word for module, word in spec.tp_plan.items() if word not in ctx.claims.whole_plan_words}
    is_split = split_shapes({name: shape}, plan, sizes[TENSOR])[name] != tuple(shape)
    of_tensor = {TENSOR: 1} if is_split else {}
    if stage:
        return {**sizes, **of_tensor, DATA_SHARD: 1, CONTEXT: 1, EXPERT: 1}
    return {**sizes, **of_tensor, **({EXPERT: 1} if is_of_expert(ctx, name) else {})}


def judge_owners(
    ctx: JudgeContext, name: str, elements: int, owned: Sequence[Spans], counts: Mapping[str, int]
) -> Iterator[Comparison]:
    """Check that along each axis, ranks at as many coordinates own each element of a parameter as ``counts`` says.

    The number of all owners does not tell along which axis they lie. For example, with two copies of two shards each
    element has 2 owners, also if the ranks of dp_shard have the copies and the ranks of dp_replicate have the shards.
    """
    lengths, owners = mark_owners(elements, owned)
    place, right = ctx.location(name, Part.GATHER), float(math.prod(counts.values()))
    along = {axis: count_along(ctx, axis, owners, counts) for axis in list_axes(ctx)}
    comparison = compare_numbers(place, right, owners.sum(dim=0), lengths)
    if comparison.mismatch is not None:
        run = find_run(comparison, lengths)
        wrong = iter_wrong_axes(counts, {axis: int(numbers[run]) for axis, numbers in along.items()})
        comparison = add_hint(comparison, ", ".join((OWNERS, *wrong)) + describe_owners(ctx, owners[:, run]))
    yield comparison
    for axis, numbers in along.items():
        comparison = compare_numbers(place, float(counts[axis]), numbers, lengths)
        if comparison.mismatch is not None:
            ranks = describe_owners(ctx, owners[:, find_run(comparison, lengths)])
            comparison = add_hint(comparison, f"{explain_number(axis)}{ranks}")
        yield comparison


def explain_number(axis: str) -> str:
    """Return a sentence that says what a compared number along ``axis`` counts."""
    return f"this is the number of coordinates of {axis} whose ranks own the element by layout()"


def mark_owners(elements: int, owned: Sequence[Spans]) -> tuple[Tensor, Tensor]:
    """Return the lengths of runs of elements with the same owners, and how often each rank owns each run."""
    bounds = sorted({0, elements, *(bound for spans in owned for span in spans for bound in span)})
    runs = {bound: run for run, bound in enumerate(bounds)}
    owners = torch.zeros(len(owned), len(bounds) - 1)
    for rank, spans in enumerate(owned):
        for start, stop in spans:
            owners[rank, runs[start] : runs[stop]] += 1
    return torch.tensor(bounds).diff(), owners


def measure_axes(ctx: JudgeContext) -> dict[str, int]:
    """Return the size of every axis, with dp_shard divided by ep, so that the product is the number of ranks."""
    shape, experts = ctx.mesh.shape(ctx.world_size), ctx.mesh.size(EXPERT)
    return {**shape, DATA_SHARD: shape[DATA_SHARD] // experts, EXPERT: experts}


def place_rank(ctx: JudgeContext, rank: int) -> dict[str, int]:
    """Return the coordinate of ``rank`` along each axis of ``measure_axes``."""
    at = ctx.mesh.coordinates(rank, ctx.world_size)
    group, expert = divmod(at[DATA_SHARD], ctx.mesh.size(EXPERT))
    return {**{axis: at[axis] for axis in AXES}, DATA_SHARD: group, EXPERT: expert}


def count_along(ctx: JudgeContext, axis: str, owners: Tensor, counts: Mapping[str, int]) -> Tensor:
    """Return at how many coordinates of ``axis`` ranks own each run of elements; a wrong number has precedence.

    Coordinates are counted for each combination of coordinates on other axes that copy the element. If ``axis`` copies
    the element, each combination needs all coordinates of ``axis``. If ``axis`` splits the element, all copies need the
    same coordinate. There is one exception: ZeRO shards the weights of each rank of tp and of each stage separately. So
    an element that tp does not split may be in the first shard on one rank of tp and in the second shard on another.
    The number is 0 if the element has no owner.
    """
    sizes = measure_axes(ctx)
    others = [other for other, number in counts.items() if other != axis and number > 1]
    apart = others if counts[axis] == sizes[axis] else [other for other in others if other in CUT_ALONE]
    places = [place_rank(ctx, rank) for rank in range(ctx.world_size)]
    groups = [tuple(place[other] for other in apart) for place in places]
    numbers = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    rows = [numbers[group] * sizes[axis] + place[axis] for group, place in zip(groups, places, strict=True)]
    table = owners.new_zeros(len(numbers) * sizes[axis], owners.shape[1])
    table.index_add_(0, torch.tensor(rows), owners)
    found = (table > 0).view(len(numbers), sizes[axis], -1).sum(dim=1)
    is_wrong = (found > 0) & (found != counts[axis])
    first_wrong = found.gather(0, is_wrong.int().argmax(dim=0, keepdim=True))[0]
    return torch.where(is_wrong.any(dim=0), first_wrong, counts[axis]).float() * owners.any(dim=0)


def compare_numbers(place: TensorLocation, right: float, numbers: Tensor, lengths: Tensor) -> Comparison:
    """Compare the number of owners of each element, given for runs of ``lengths``, with the ``right`` number."""
    found = numbers.repeat_interleave(lengths)
    return compare_bitwise(place, torch.full_like(found, right), found)


def find_run(comparison: Comparison, lengths: Tensor) -> int:
    """Return the number of the run that contains the wrong element of ``comparison``."""
    (element,) = comparison.mismatch.index if comparison.mismatch else (0,)
    return int(torch.searchsorted(lengths.cumsum(dim=0), element, right=True))


def iter_wrong_axes(counts: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    """Yield a text for each axis along which ``found`` has another number of owners than ``counts``."""
    for axis, number in found.items():
        if number != counts[axis]:
            yield f"{number} along {axis} instead of {counts[axis]}"


def describe_owners(ctx: JudgeContext, owners: Tensor) -> str:
    """Return the ranks that own an element, with their coordinates, as the end of a hint; '' without an owner."""
    ranks = [
        f"rank {rank} ({ctx.mesh.describe_rank(rank, ctx.world_size)})" for rank in owners.nonzero().flatten().tolist()
    ]
    return f": {', '.join(ranks)}" if ranks else ""
