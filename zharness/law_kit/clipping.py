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

CLIP_ROUNDINGS = 3  # roundings of torch.nn.utils.clip_grad_norm_'s factor: of the norm, of norm + 1e-6, of the quotient


@dataclass(frozen=True)
class ClipFactor:
    """By what gradients are clipped: 1 where they are not, NaN where the norm is, as torch's.

    ``unknown`` is how far, relative to it, an engine's may be beyond CLIPPING: the rounding of a norm that it does not
    report.
    """

    value: float = 1.0
    uncertainty: float = 0.0

    @classmethod
    def from_norm(cls, limit: float, norm: Tensor, error: Tensor, reported_norm: Tensor | None) -> ClipFactor:
        """That of torch.nn.utils.clip_grad_norm_ to ``limit``, by the norm ``reported``; where there is none, by
        ``norm``, which an engine's may be off by ``error``."""
        if reported_norm is not None:
            return cls(float(compute_clip_factor(limit, reported_norm)))
        value, norms = compute_clip_factor(limit, norm), ((norm - error).clamp(min=0.0), norm + error)
        return cls(
            float(value),
            float(torch.stack([(compute_clip_factor(limit, one) - value).abs() for one in norms]).max() / value),
        )

    def apply_to(self, grad: BoundedTensor) -> BoundedTensor:
        """``grad`` times the factor; ``grad`` itself where nobody clips."""
        if self == ClipFactor():
            return grad
        value = torch.tensor(self.value, dtype=torch.float64)
        return grad * BoundedTensor(
            value, value * (gamma(CLIP_ROUNDINGS - 1, grad.dtype) + self.uncertainty), grad.dtype
        )


def compute_clip_factor(limit: float, norm: Tensor) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor to ``limit``, in float64."""
    return (limit / (norm.double() + 1e-6)).clamp(max=1.0)


NO_CLIPPING = ClipFactor()


def hint_missing_norm(comparison: Comparison) -> Comparison:
    """Say so when a norm is wrong because there is none: it is recorded as NaN."""
    absent = comparison.mismatch is not None and math.isnan(comparison.mismatch.actual)
    return add_hint(comparison, "the engine reports none") if absent else comparison


def judge_clip_factor(
    ctx: JudgeContext, label: str, step: int, grads: Mapping[str, Tensor], limit: float
) -> Generator[Comparison, None, ClipFactor]:
    """On every rank the norm recorded under ``label`` is that of all ``grads`` together; the factor by which
    torch.nn.utils.clip_grad_norm_ clips them to ``limit``, 1 where it does not.

    That an engine which clips reports none is told by training.clip_and_norm, which records it as NaN. What it clips by
    is then known as well as a norm is: DeepSpeed's stage 0 averages it over ranks, which rounds once more for each.
    """
    if not ctx.has_record(label):
        return NO_CLIPPING
    norm, error = total_norm_and_bound(grads)
    reported = yield from judge_reported_norm(ctx, label, step, norm, error)
    return ClipFactor.from_norm(limit, norm, error, reported)


def judge_reported_norm(
    ctx: JudgeContext, label: str, step: int, norm: Tensor, error: Tensor
) -> Generator[Comparison, None, Tensor | None]:
    """On every rank the norm recorded under ``label`` is ``norm``, within ``error``; rank 0's, if there is one."""
    reported = [copy.get("norm") for copy in ctx.rank_records(label, step)]
    for rank, each in enumerate(reported):
        if each is not None:
            yield hint_missing_norm(
                compare_within_bound(ctx.location("norm", Part.REDUCTION, step, rank), norm, each, error)
            )
    return reported[0]
