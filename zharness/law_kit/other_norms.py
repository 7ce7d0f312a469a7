"""Compute the norms of parts of the gradients, by which engines clip wrongly or which they report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.training_run import total_norm

Spans = tuple[tuple[int, int], ...]  # flat elements, each from a start to a stop
Gradients = Mapping[str, Tensor]


def iter_other_norms(ctx: JudgeContext, grads: Gradients) -> Iterator[tuple[str, float]]:
    """Yield norms by which engines clip wrongly, each with what it is."""
    of_ranks = {text: float(total_norm(part)) for text, part in list_rank_parts(ctx, grads).items()}
    yield from of_ranks.items()
    yield "the mean of the ranks' norms of what each has", sum(of_ranks.values()) / len(of_ranks)
    yield from ((text, float(total_norm(part))) for text, part in list_shared_part(ctx, grads).items())


def list_norm_parts(ctx: JudgeContext, grads: Gradients) -> dict[str, Gradients]:
    """Return the parts of ``grads`` by whose norms engines clip wrongly; the keys say what these norms are."""
    return {**list_rank_parts(ctx, grads), **list_shared_part(ctx, grads)}


def list_rank_parts(ctx: JudgeContext, grads: Gradients) -> dict[str, Gradients]:
    """Return the elements of ``grads`` that each rank owns; the keys say what their norm is."""
    return {
        f"the norm of what rank {rank} has ({ctx.mesh.describe_rank(rank, ctx.world_size)})": {
            f"{name}[{start}:{stop}]": grad.flatten()[start:stop]
            for name, grad in grads.items()
            for start, stop in list_owned_spans(ctx, rank, name, grad.numel())
        }
        for rank in range(ctx.world_size)
    }


def list_shared_part(ctx: JudgeContext, grads: Gradients) -> dict[str, Gradients]:
    """Return ``grads`` without those of experts, if the model has experts; the key says what their norm is."""
    experts = tuple(f"{layer}.experts." for layer in ctx.baseline.spec.ep_plan)
    shared = {name: grad for name, grad in grads.items() if not name.startswith(experts)}
    return {"the norm of all gradients but those of experts": shared} if experts else {}


def list_owned_spans(ctx: JudgeContext, rank: int, name: str, elements: int) -> Spans:
    """Return the flat elements that ``rank`` owns of a parameter, which are all if the layout has no entry for it."""
    pieces = ctx.evidence[rank].layout.get(name, (Piece(rank, 0, elements),))
    return tuple((piece.start, piece.stop) for piece in pieces if piece.rank == rank)
