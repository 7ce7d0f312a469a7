"""Compute the factor by which an engine clips gradients, and check the norm that the engine reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import iter_other_norms
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.parity import Comparison, Part, compare_within_bound
from zharness.parity.bounds import BoundedTensor, gamma

NO_GRADIENT_HINT = "it is the norm of no gradient"
INFINITE_NORM_HINT = "it is infinite, and the gradients are finite"
NORM_FACTORS = (0.25, 0.5, 2.0, 4.0)  # factors that a wrong number of ranks or micro-batches gives

CLIP_ROUNDINGS = 3  # torch.nn.utils.clip_grad_norm_ rounds the norm, norm + 1e-6, and the quotient


@dataclass(frozen=True)
class ClipFactor:
    """The factor by which an engine multiplies gradients to clip them: 1 without clipping, NaN if the norm is NaN.

    ``uncertainty`` is the relative error of the factor in addition to the roundings of torch's formula. The uncertainty
    is greater than 0 if the engine does not report the norm from which it computed the factor.
    """

    value: float = 1.0
    uncertainty: float = 0.0

    @classmethod
    def from_norm(cls, limit: float, norm: Tensor, error: Tensor, reported_norm: Tensor | None) -> ClipFactor:
        """Return the factor by which torch.nn.utils.clip_grad_norm_ clips gradients to the maximum norm ``limit``.

        The factor is computed from ``reported_norm``. If ``reported_norm`` is None, the factor is computed from
        ``norm``, and its uncertainty allows for an engine whose norm is smaller or larger by up to ``error``.
        """
        if reported_norm is not None:
            return cls(float(compute_clip_factor(limit, reported_norm)))
        value, norms = compute_clip_factor(limit, norm), ((norm - error).clamp(min=0.0), norm + error)
        return cls(
            float(value),
            float(torch.stack([(compute_clip_factor(limit, edge) - value).abs() for edge in norms]).max() / value),
        )

    def apply_to(self, grad: BoundedTensor) -> BoundedTensor:
        """Return ``grad`` times the factor, or ``grad`` itself if gradients are not clipped."""
        if self == ClipFactor():
            return grad
        value = torch.tensor(self.value, dtype=torch.float64)
        return grad * BoundedTensor(
            value, value * (gamma(CLIP_ROUNDINGS - 1, grad.dtype) + self.uncertainty), grad.dtype
        )


def compute_clip_factor(limit: float, norm: Tensor) -> Tensor:
    """Return the factor by which torch.nn.utils.clip_grad_norm_ clips a norm to ``limit``, in float64."""
    return (limit / (norm.double() + 1e-6)).clamp(max=1.0)


NO_CLIPPING = ClipFactor()
NEVER_CLIPS = 2.0**40  # far above every norm, so that norms are computed and no gradient changes


def hint_missing_norm(comparison: Comparison) -> Comparison:
    """Add a hint to a mismatch of a norm that is not reported (NaN), is infinite, or is the norm of no gradient."""
    mismatch = comparison.mismatch
    if mismatch is not None and math.isnan(mismatch.actual):
        return add_hint(comparison, "the engine reports none")
    if mismatch is not None and mismatch.actual == 0:
        return add_hint(comparison, NO_GRADIENT_HINT)
    if mismatch is not None and math.isinf(mismatch.actual) and math.isfinite(mismatch.expected):
        return add_hint(comparison, INFINITE_NORM_HINT)
    return comparison


def hint_other_norm(comparison: Comparison, suspects: Mapping[str, Mapping[str, Tensor]]) -> Comparison:
    """Add to a mismatch of a norm the key of the gradients in ``suspects`` that have this norm."""
    if comparison.mismatch is None:
        return comparison
    for hint, grads in suspects.items():
        norm, error = total_norm_and_bound(grads)
        if abs(comparison.mismatch.actual - float(norm)) <= float(error):
            return add_hint(comparison, hint)
    return comparison


def hint_scaled_norm(comparison: Comparison, error: Tensor) -> Comparison:
    """Add to a mismatch without a hint the factor of NORM_FACTORS by which the norm is wrong, up to ``error``."""
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.hint:
        return comparison
    for factor in NORM_FACTORS:
        if abs(mismatch.actual - factor * mismatch.expected) <= factor * float(error):
            return add_hint(comparison, f"it is {factor:g} x the right norm")
    return comparison


def hint_norm_on_mesh(ctx: JudgeContext, comparison: Comparison, grads: Mapping[str, Tensor]) -> Comparison:
    """Add to a mismatch of a norm on a mesh what the norm is: the norm of a part, or a norm that repeats replicas."""
    mismatch = comparison.mismatch
    if mismatch is None or not ctx.mesh.sizes:
        return comparison
    for norm in iter_other_norms(ctx, grads):
        if norm.value and abs(mismatch.actual - norm.value) <= norm.error:
            return add_hint(comparison, "; ".join(filter(None, (mismatch.hint, f"it {norm.meaning}"))))
    return comparison


def judge_clip_factor(
    ctx: JudgeContext,
    label: str,
    step: int,
    grads: Mapping[str, Tensor],
    limit: float,
    suspects: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> Generator[Comparison, None, ClipFactor]:
    """Compare the norm that every rank recorded under ``label`` with that of ``grads``, and return the clip factor.

    The clip factor is the factor by which torch.nn.utils.clip_grad_norm_ clips to ``limit``, or 1 if nothing was
    recorded under ``label``. If an engine clips but reports no norm, the law training.clip_and_norm fails; this
    function then computes the factor within the error of the norm. The bound of the norm allows one more rounding for
    each rank, because DeepSpeed averages the norm over ranks at stage 0. ``suspects`` maps a hint to other gradients; a
    mismatch gets the hint if the reported norm is the norm of these gradients. On a mesh, the norms of
    ``iter_other_norms`` are suspects too.
    """
    if not ctx.has_record(label):
        return NO_CLIPPING
    norm, error = total_norm_and_bound(grads)

    def explain(comparison: Comparison) -> Comparison:
        return hint_norm_on_mesh(ctx, hint_other_norm(comparison, suspects), grads)

    reported = yield from judge_reported_norm(ctx, label, step, norm, error, explain)
    return ClipFactor.from_norm(limit, norm, error, reported)


def judge_reported_norm(
    ctx: JudgeContext,
    label: str,
    step: int,
    norm: Tensor,
    error: Tensor,
    explain: Callable[[Comparison], Comparison] | None = None,
) -> Generator[Comparison, None, Tensor | None]:
    """Check that every rank's norm recorded under ``label`` equals ``norm`` within ``error``, and return rank 0's norm.

    ``explain`` adds a hint to a mismatch. The return value is None if rank 0 recorded no norm.
    """
    reported = [record.get("norm") for record in ctx.rank_records(label, step)]
    for rank, rank_norm in enumerate(reported):
        if rank_norm is not None:
            place = ctx.location("norm", Part.REDUCTION, step, rank)
            comparison = hint_missing_norm(compare_within_bound(place, norm, rank_norm, error))
            comparison = hint_scaled_norm(comparison, error)
            yield comparison if explain is None else explain(comparison)
    return reported[0]
