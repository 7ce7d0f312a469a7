"""The factor by which an engine clips gradients, judged by the norm that it reports."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.parity import Comparison, Part, compare_within_bound
from zharness.parity.bounds import BoundedTensor, gamma

CLIP_ROUNDINGS = 3  # torch.nn.utils.clip_grad_norm_ rounds the norm, norm + 1e-6, and the quotient


@dataclass(frozen=True)
class ClipFactor:
    """The factor by which gradients are clipped: 1 without clipping, NaN where the norm is NaN, as in torch.

    ``uncertainty`` is the relative distance by which an engine's factor may differ beyond the roundings of torch's
    formula, because the engine reports no norm.
    """

    value: float = 1.0
    uncertainty: float = 0.0

    @classmethod
    def from_norm(cls, limit: float, norm: Tensor, error: Tensor, reported_norm: Tensor | None) -> ClipFactor:
        """Return the factor by which torch.nn.utils.clip_grad_norm_ clips to ``limit``.

        The factor is computed from ``reported_norm``. If that is None, it is computed from ``norm``, and the engine's
        norm may be up to ``error`` smaller or larger.
        """
        if reported_norm is not None:
            return cls(float(compute_clip_factor(limit, reported_norm)))
        value, norms = compute_clip_factor(limit, norm), ((norm - error).clamp(min=0.0), norm + error)
        return cls(
            float(value),
            float(torch.stack([(compute_clip_factor(limit, edge) - value).abs() for edge in norms]).max() / value),
        )

    def apply_to(self, grad: BoundedTensor) -> BoundedTensor:
        """Return ``grad`` times the factor; ``grad`` itself without clipping."""
        if self == ClipFactor():
            return grad
        value = torch.tensor(self.value, dtype=torch.float64)
        return grad * BoundedTensor(
            value, value * (gamma(CLIP_ROUNDINGS - 1, grad.dtype) + self.uncertainty), grad.dtype
        )


def compute_clip_factor(limit: float, norm: Tensor) -> Tensor:
    """Return torch.nn.utils.clip_grad_norm_'s factor to ``limit``, in float64."""
    return (limit / (norm.double() + 1e-6)).clamp(max=1.0)


NO_CLIPPING = ClipFactor()


def hint_missing_norm(comparison: Comparison) -> Comparison:
    """Add a hint to a mismatch of a norm that the engine did not report, which is recorded as NaN."""
    absent = comparison.mismatch is not None and math.isnan(comparison.mismatch.actual)
    return add_hint(comparison, "the engine reports none") if absent else comparison


def judge_clip_factor(
    ctx: JudgeContext, label: str, step: int, grads: Mapping[str, Tensor], limit: float
) -> Generator[Comparison, None, ClipFactor]:
    """Compare every rank's norm recorded under ``label`` with the norm of all ``grads``; return the clip factor.

    The factor is torch.nn.utils.clip_grad_norm_'s to ``limit``; 1 where no norm was recorded. An engine that clips and
    reports no norm fails training.clip_and_norm; here its factor is known only within the error of the norm.
    DeepSpeed's stage 0 averages the norm over ranks, which rounds once more for each rank.
    """
    if not ctx.has_record(label):
        return NO_CLIPPING
    norm, error = total_norm_and_bound(grads)
    reported = yield from judge_reported_norm(ctx, label, step, norm, error)
    return ClipFactor.from_norm(limit, norm, error, reported)


def judge_reported_norm(
    ctx: JudgeContext, label: str, step: int, norm: Tensor, error: Tensor
) -> Generator[Comparison, None, Tensor | None]:
    """Compare the norm recorded under ``label`` with ``norm``, within ``error``; return rank 0's norm, if any."""
    reported = [record.get("norm") for record in ctx.rank_records(label, step)]
    for rank, rank_norm in enumerate(reported):
        if rank_norm is not None:
            yield hint_missing_norm(
                compare_within_bound(ctx.location("norm", Part.REDUCTION, step, rank), norm, rank_norm, error)
            )
    return reported[0]
