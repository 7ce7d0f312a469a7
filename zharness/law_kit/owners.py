"""Judge by how many ranks of a mesh, and along which axes, each element of a master weight is owned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.observed_collectives import split_shapes
from zharness.law_kit.other_norms import Spans, is_of_expert, list_axes
from zharness.mesh import AXES, CONTEXT, DATA_SHARD, EXPERT, TENSOR
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.comparison import TensorLocation

OWNERS = "this is the number of ranks that own the element by layout()"


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


def judge_owners(
    ctx: JudgeContext, name: str, elements: int, owned: Sequence[Spans], counts: Mapping[str, int] | None = None
) -> Iterator[Comparison]:
    """Check that as many ranks own each element of a parameter as ``counts`` has by axis; if None, equally many.

    The number of all owners does not tell along which axis they lie: with two copies of two shards it is 2 as well if
    the ranks of dp_shard have the copies, and those of dp_replicate the shards.
    """
    lengths, owners = mark_owners(elements, owned)
    place, totals = ctx.location(name, Part.GATHER), owners.sum(dim=0)
    if counts is None:
        yield add_hint(compare_numbers(place, float(totals.max().clamp(min=1)), totals, lengths), OWNERS)
        return
    along = {axis: count_along(ctx, axis, owners, counts[axis]) for axis in list_axes(ctx)}
    comparison = compare_numbers(place, float(math.prod(counts[axis] for axis in AXES)), totals, lengths)
    if comparison.mismatch is not None:
        (element,) = comparison.mismatch.index
        run = int(torch.searchsorted(lengths.cumsum(dim=0), element, right=True))
        wrong = iter_wrong_axes(counts, {axis: int(numbers[run]) for axis, numbers in along.items()})
        comparison = add_hint(comparison, ", ".join((OWNERS, *wrong)))
    yield comparison
    for axis, numbers in along.items():
        hint = f"this is the number of ranks along {axis} that own the element by layout()"
        yield add_hint(compare_numbers(place, float(counts[axis]), numbers, lengths), hint)


def mark_owners(elements: int, owned: Sequence[Spans]) -> tuple[Tensor, Tensor]:
    """Return the lengths of runs of elements with the same owners, and how often each rank owns each run."""
    bounds = sorted({0, elements, *(bound for spans in owned for span in spans for bound in span)})
    runs = {bound: run for run, bound in enumerate(bounds)}
    owners = torch.zeros(len(owned), len(bounds) - 1)
    for rank, spans in enumerate(owned):
        for start, stop in spans:
            owners[rank, runs[start] : runs[stop]] += 1
    return torch.tensor(bounds).diff(), owners


def count_along(ctx: JudgeContext, axis: str, owners: Tensor, right: int) -> Tensor:
    """Return how many of the ranks along ``axis`` own each run of elements: a number other than ``right``, if any.

    Where all ranks along an axis have to own an element, its coordinates with an owner are counted, whatever the
    owner's other coordinates: ZeRO cuts the weights of each rank of tp as it has them, so that an element that is whole
    on tp may be in the first shard on one rank of tp and in the second one on another. Without an owner it is 0.
    """
    coordinates = [ctx.mesh.coordinates(rank, ctx.world_size)[axis] for rank in range(ctx.world_size)]
    if right == max(coordinates) + 1:
        return add_up_rows(owners, coordinates).bool().sum(dim=0).float()
    starts = [ctx.mesh.rank_at_start(axis, rank, ctx.world_size) for rank in range(ctx.world_size)]
    along = add_up_rows(owners, starts)[starts]
    is_wrong = (owners > 0) & (along != right)
    first_wrong = along.gather(0, is_wrong.int().argmax(dim=0, keepdim=True))[0]
    return torch.where(is_wrong.any(dim=0), first_wrong, float(right)) * owners.any(dim=0)


def add_up_rows(owners: Tensor, targets: Sequence[int]) -> Tensor:
    """Return a tensor to each of whose rows the rows of ``owners`` with this target are added."""
    return torch.zeros_like(owners).index_add_(0, torch.tensor(targets), owners)


def compare_numbers(place: TensorLocation, right: float, numbers: Tensor, lengths: Tensor) -> Comparison:
    """Compare the number of owners of each element, in runs of ``lengths``, with the ``right`` one."""
    found = numbers.repeat_interleave(lengths)
    return compare_bitwise(place, torch.full_like(found, right), found)


def iter_wrong_axes(counts: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each axis along which ``found`` has not as many owners as ``counts``."""
    for axis, number in found.items():
        if number != counts[axis]:
            yield f"{number} along {axis} instead of {counts[axis]}"
