"""Compute the norms of parts of the gradients, by which engines clip wrongly or which they report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.training_run import total_norm


def iter_other_norms(ctx: JudgeContext, grads: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield norms by which engines clip wrongly, each with what it is."""
    norms = {text: float(total_norm(part)) for text, part in list_norm_parts(ctx, grads).items()}
    yield from norms.items()
    own = list(norms.values())[: ctx.world_size]
    yield "the mean of the ranks' norms of what each has", sum(own) / len(own)


def list_norm_parts(ctx: JudgeContext, grads: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return parts of the gradients by whose norms engines clip wrongly, by what the norm is; first those of ranks."""
    parts = {
        f"the norm of what rank {rank} has ({ctx.mesh.describe_rank(rank, ctx.world_size)})": list_owned(
            ctx, grads, rank
        )
        for rank in range(ctx.world_size)
    }
    experts = tuple(f"{layer}.experts." for layer in ctx.baseline.spec.ep_plan)
    shared = {name: grad for name, grad in grads.items() if not name.startswith(experts)}
    return {**parts, "the norm of all gradients but those of experts": shared} if experts else parts


def list_owned(ctx: JudgeContext, grads: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the elements of ``grads`` that ``rank`` owns, flat, by parameter and start."""
    layout = ctx.evidence[rank].layout
    return {
        f"{name}[{piece.start}:{piece.stop}]": grad.flatten()[piece.start : piece.stop]
        for name, grad in grads.items()
        for piece in layout.get(name, (Piece(rank, 0, grad.numel()),))
        if piece.rank == rank
    }
