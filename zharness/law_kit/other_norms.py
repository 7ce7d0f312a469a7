"""Compute norms, other than the norm of all gradients, that wrong engines clip by or report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.mesh import AXES, CONTEXT, DATA_SHARD, EXPERT

Spans = tuple[tuple[int, int], ...]  # flat elements, each from a start to a stop
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class OtherNorm:
    """A norm by which a wrong engine clips, a bound on its error, and ``meaning``, which says what the norm is."""

    meaning: str
    value: float
    error: float

    @classmethod
    def from_grads(cls, meaning: str, grads: Gradients) -> OtherNorm:
        """Return the norm of ``grads``, which is 0 if there are no gradients."""
        norm, error = total_norm_and_bound(grads) if grads else (torch.zeros(()), torch.zeros(()))
        return cls(meaning, float(norm), float(error))

    @classmethod
    def from_mean(cls, meaning: str, norms: Sequence[OtherNorm]) -> OtherNorm:
        """Return the mean of ``norms``."""
        value, error = (
            sum(each) / len(norms) for each in zip(*((norm.value, norm.error) for norm in norms), strict=True)
        )
        return cls(meaning, value, error)


def iter_other_norms(ctx: JudgeContext, grads: Gradients) -> Iterator[OtherNorm]:
    """Yield norms by which wrong engines clip: norms of parts, their means, and norms that count replicas again."""
    of_ranks = [
        OtherNorm.from_grads(
            f"is the norm of what rank {rank} has ({ctx.mesh.describe_rank(rank, ctx.world_size)})",
            select_part(ctx, [rank], grads),
        )
        for rank in range(ctx.world_size)
    ]
    yield from of_ranks
    yield OtherNorm.from_mean("is the mean of the ranks' norms of what each has", of_ranks)
    if ctx.baseline.spec.ep_plan:
        shared = {name: grad for name, grad in grads.items() if not is_of_expert(ctx, name)}
        yield OtherNorm.from_grads("is the norm of all gradients but those of experts", shared)
    axes = list_axes(ctx)
    for axis in axes:
        yield from iter_norms_along(ctx, axis, grads)
    yield from iter_repeated_norms(ctx, axes, grads)


def iter_norms_along(ctx: JudgeContext, axis: str, grads: Gradients) -> Iterator[OtherNorm]:
    """Yield the norm of the gradients that the ranks at each coordinate of ``axis`` have, and the mean of the norms."""
    norms = [
        OtherNorm.from_grads(f"is the norm of what the ranks of {axis} {at} have", select_part(ctx, ranks, grads, axis))
        for at, ranks in enumerate(list_coordinates(ctx, axis))
    ]
    yield from norms
    yield OtherNorm.from_mean(f"is the mean of the norms of what the coordinates of {axis} have", norms)


def iter_repeated_norms(ctx: JudgeContext, axes: Sequence[str], grads: Gradients) -> Iterator[OtherNorm]:
    """Yield norms that count gradients which ranks along one or several axes have in common once per rank.

    If several axes give the same norm, the meaning of the norm names all of them.
    """
    counts = {axis: [count_replicas(ctx, axis, name, grad.numel()) for name, grad in grads.items()] for axis in axes}
    replicating = [axis for axis in axes if max(counts[axis], default=1) > 1]
    texts = {
        axis: f"what {max(counts[axis])} ranks of {axis} have in common {max(counts[axis])} times"
        for axis in replicating
    }
    meanings: dict[tuple[int, ...], list[str]] = {}
    for size in range(1, len(replicating) + 1):
        for subset in combinations(replicating, size):
            times = tuple(map(math.prod, zip(*(counts[axis] for axis in subset), strict=True)))
            meanings.setdefault(times, []).append(" and ".join(texts[axis] for axis in subset))
    for times, alternatives in meanings.items():
        yield OtherNorm.from_grads(f"counts {', or '.join(alternatives)}", repeat_grads(grads, times))


def repeat_grads(grads: Gradients, times: Iterable[int]) -> Gradients:
    """Return each of ``grads`` as often as ``times`` says, without a copy."""
    return {
        f"{name}, time {index}": grad
        for (name, grad), count in zip(grads.items(), times, strict=True)
        for index in range(count)
    }


def list_axes(ctx: JudgeContext) -> list[str]:
    """Return the axes along which there are several ranks, with the axis of experts last; none for the default mesh."""
    if not ctx.mesh.sizes:
        return []
    shape, experts = ctx.mesh.shape(ctx.world_size), ctx.mesh.size(EXPERT)
    # Where experts are split over all ranks of dp_shard, its coordinates are those of ep.
    sizes = {**shape, DATA_SHARD: 1 if shape[DATA_SHARD] == experts else shape[DATA_SHARD], EXPERT: experts}
    return [axis for axis in (*AXES, EXPERT) if sizes[axis] > 1]


def list_coordinates(ctx: JudgeContext, axis: str) -> list[list[int]]:
    """Return, for each coordinate of ``axis``, the ranks at this coordinate."""
    ranks: dict[int, list[int]] = {}
    for rank in range(ctx.world_size):
        ranks.setdefault(ctx.mesh.coordinates(rank, ctx.world_size)[axis], []).append(rank)
    return [ranks[at] for at in sorted(ranks)]


def count_replicas(ctx: JudgeContext, axis: str, name: str, elements: int) -> int:
    """Return at how many coordinates of ``axis`` the ranks have the whole gradient of a parameter, at least 1."""
    spans = [find_spans(ctx, ranks, name, elements, axis) for ranks in list_coordinates(ctx, axis)]
    return max(1, sum(sum(stop - start for start, stop in each) == elements for each in spans))


def is_of_expert(ctx: JudgeContext, name: str) -> bool:
    """Return whether a parameter belongs to an expert."""
    return name.startswith(tuple(f"{layer}.experts." for layer in ctx.baseline.spec.ep_plan))


def select_part(ctx: JudgeContext, ranks: Collection[int], grads: Gradients, axis: str = "") -> Gradients:
    """Return the elements of ``grads`` that any of ``ranks``, the ranks at a coordinate of ``axis``, has, each once."""
    return {
        f"{name}[{start}:{stop}]": grad.flatten()[start:stop]
        for name, grad in grads.items()
        for start, stop in find_spans(ctx, ranks, name, grad.numel(), axis)
    }


def find_spans(
    ctx: JudgeContext, ranks: Collection[int], name: str, elements: int, axis: str = ""
) -> list[tuple[int, int]]:
    """Return the flat elements of a parameter that any of ``ranks`` has, each once.

    If ``axis`` is given, ``ranks`` are the ranks at one coordinate of it. Each coordinate of cp has all elements, and
    each coordinate of ep has all elements of parameters that do not belong to experts. The layout does not show this,
    because ZeRO shards over these ranks the parameters that they have in common.
    """
    if axis == CONTEXT or (axis == EXPERT and not is_of_expert(ctx, name)):
        return [(0, elements)]
    spans: list[tuple[int, int]] = []
    end = 0
    for start, stop in sorted({span for rank in ranks for span in list_owned_spans(ctx, rank, name, elements)}):
        if stop > end:
            spans.append((max(start, end), stop))
            end = stop
    return spans


def list_owned_spans(ctx: JudgeContext, rank: int, name: str, elements: int) -> Spans:
    """Return the flat elements of a parameter that ``rank`` owns: all elements if the layout has no entry for it."""
    pieces = ctx.evidence[rank].layout.get(name, (Piece(rank, 0, elements),))
    return tuple((piece.start, piece.stop) for piece in pieces if piece.rank == rank)
