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
CUT_ALONE = (PIPELINE, TENSOR)  # each coordinate of these axes cuts into shards what it has, where it has it


def count_owners(ctx: JudgeContext, stage: int, name: str, shape: Sequence[int]) -> Mapping[str, int]:
    """Return, by axis, at how many of its coordinates each element of a master weight is owned: at one, or at all.

    From stage 1 on the ranks of dp_shard and cp have a shard each. Those of tp have a part each of a weight that the
    plan splits, and those of ep of the experts, which stages from 1 on shard over the ranks that have the same ones.
    The owners are all combinations of these coordinates. Beside ep, a coordinate of dp_shard is a group of its ranks.
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
    """Check that the owners of each element of a parameter are the ranks at as many coordinates as ``counts`` has.

    The number of all owners does not tell along which axis they lie: with two copies of two shards it is 2 as well if
    the ranks of dp_shard have the copies, and those of dp_replicate the shards.
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
    """Return what a number along ``axis`` is."""
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
    """Return the size of every axis; that of experts divides dp_shard, so that the product is the number of ranks."""
    shape, experts = ctx.mesh.shape(ctx.world_size), ctx.mesh.size(EXPERT)
    return {**shape, DATA_SHARD: shape[DATA_SHARD] // experts, EXPERT: experts}


def place_rank(ctx: JudgeContext, rank: int) -> dict[str, int]:
    """Return the coordinate of ``rank`` along each axis of ``measure_axes``."""
    at = ctx.mesh.coordinates(rank, ctx.world_size)
    group, expert = divmod(at[DATA_SHARD], ctx.mesh.size(EXPERT))
    return {**{axis: at[axis] for axis in AXES}, DATA_SHARD: group, EXPERT: expert}


def count_along(ctx: JudgeContext, axis: str, owners: Tensor, counts: Mapping[str, int]) -> Tensor:
    """Return at how many coordinates of ``axis`` each run of elements is owned: a number that is not right, if any.

    Along an axis that copies the element, each combination of coordinates on the other axes that copy it needs all of
    them. Along one that splits it, all copies need the same coordinate. But ZeRO cuts the weights of each rank of tp,
    and of each stage, as it has them, so that an element that is whole on tp may be in the first shard on one rank of
    tp and in the second one on another. Without an owner the number is 0.
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
    """Compare the number of owners of each element, in runs of ``lengths``, with the ``right`` one."""
    found = numbers.repeat_interleave(lengths)
    return compare_bitwise(place, torch.full_like(found, right), found)


def find_run(comparison: Comparison, lengths: Tensor) -> int:
    """Return the run of the element in which ``comparison`` has its mismatch."""
    (element,) = comparison.mismatch.index if comparison.mismatch else (0,)
    return int(torch.searchsorted(lengths.cumsum(dim=0), element, right=True))


def iter_wrong_axes(counts: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each axis along which ``found`` has not as many owners as ``counts``."""
    for axis, number in found.items():
        if number != counts[axis]:
            yield f"{number} along {axis} instead of {counts[axis]}"


def describe_owners(ctx: JudgeContext, owners: Tensor) -> str:
    """Return the ranks that own an element, with their coordinates, as the end of a hint; '' without an owner."""
    ranks = [
        f"rank {rank} ({ctx.mesh.describe_rank(rank, ctx.world_size)})" for rank in owners.nonzero().flatten().tolist()
    ]
    return f": {', '.join(ranks)}" if ranks else ""
