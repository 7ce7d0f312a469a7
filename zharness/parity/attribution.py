"""Explain a wrong gradient: find a known fault that gives the same numbers, and the part of the step with the fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zharness.parity.bounds import mean_and_bound, unit_roundoff
from zharness.parity.comparison import Comparison, Mismatch, Part

# terms[rank][micro-step]: the local gradients of one parameter
GradientTerms = Sequence[Sequence[Tensor]]

# suspects[description][loss][rank]: local gradients that an engine may have returned instead, summed over the losses
SuspectedGradients = Mapping[str, Sequence[Sequence[Tensor]]]

MAX_UNEXPLAINED_ERROR = 1 / 64  # share of the error that a fitted factor may leave; affects the hint, not the verdict


def attribute_mismatch(
    comparison: Comparison,
    actual: Tensor,
    terms: GradientTerms,
    rank_copies: Sequence[Tensor],
    suspects: SuspectedGradients,
    reduce_dtype: torch.dtype | None = None,
) -> Comparison:
    """Add to the mismatch of ``comparison``, if any, the part of the step and the hint that explain the mismatch.

    ``actual`` is the wrong gradient as one rank reports it, and ``rank_copies`` contains the full gradient as each rank
    reports it. ``terms`` and ``suspects`` contain plain PyTorch's local gradients. Gradients are reduced in
    ``reduce_dtype`` (None: in the dtype of ``actual``).
    """
    if comparison.mismatch is None:
        return comparison
    part, hint = explain_mismatch(
        actual, terms, rank_copies, suspects, comparison.mismatch, reduce_dtype or actual.dtype
    )
    return replace(comparison, mismatch=replace(comparison.mismatch, part=part, hint=hint))


def explain_mismatch(
    actual: Tensor,
    terms: GradientTerms,
    rank_copies: Sequence[Tensor],
    suspects: SuspectedGradients,
    mismatch: Mismatch,
    reduce_dtype: torch.dtype,
) -> tuple[Part, str]:
    """Return the part of the step, and the hint, of the first known fault that would give the numbers ``actual``.

    If no known fault gives these numbers, return ``Part.LOCAL_GRADIENT`` and an empty hint.
    """
    ranks_agree = all(torch.equal(rank_copies[0], copy) for copy in rank_copies[1:])
    # Suspects are reduced gradients, which all ranks report alike. If the ranks disagree, no suspect explains it.
    for what, losses in suspects.items() if ranks_agree else ():
        suspected = [term for row in losses for term in row]
        if suspected and is_close_to_mean(actual, suspected, len(losses), reduce_dtype):
            return Part.REDUCTION, f"it is {what}"
    total = sum(len(row) for row in terms)
    for subset, (part, what) in candidate_faults(terms).items():
        kept = [terms[rank][micro] for rank, micro in subset]
        if is_close_to_mean(actual, kept, 1, reduce_dtype):
            return part, f"it is {what}"
        if is_close_to_mean(actual, kept, len(kept) / total, reduce_dtype):
            return part, f"it is {what}, divided as if nothing were missing"
    if not ranks_agree:
        return Part.REDUCTION, "the ranks report different gradients"
    for narrow in (torch.float16, torch.bfloat16):
        if is_rounded_to(narrow, actual, [term for row in terms for term in row]):
            return Part.REDUCTION, f"it is the mean, reduced in {str(narrow).removeprefix('torch.')}"
    factor = fit_scale(actual, [term for row in terms for term in row])
    if factor is not None:
        return Part.REDUCTION, f"it is {factor:.7g} x the right gradient"
    if mismatch.owner is not None and mismatch.wrong < mismatch.total:
        return Part.REDUCTION, describe_wrong_elements(mismatch)
    return Part.LOCAL_GRADIENT, ""


def describe_wrong_elements(mismatch: Mismatch) -> str:
    """Return the hint of a mismatch of some elements whose cause is unknown."""
    return f"only {mismatch.wrong} of {mismatch.total} elements are wrong"


def is_unexplained(mismatch: Mismatch) -> bool:
    """Return whether the hint of ``mismatch`` names no cause."""
    return mismatch.hint in ("", describe_wrong_elements(mismatch))


def candidate_faults(terms: GradientTerms) -> Mapping[tuple[tuple[int, int], ...], tuple[Part, str]]:
    """Map each subset of ``terms`` whose mean would be a known fault's result to that fault's part and description.

    A subset is a tuple of (rank, micro-step) pairs.
    """
    ranks, micros = range(len(terms)), range(len(terms[0]))
    found: dict[tuple[tuple[int, int], ...], tuple[Part, str]] = {}
    if len(micros) > 1:
        for chosen in micros:
            alone = tuple((rank, chosen) for rank in ranks)
            found[alone] = (Part.ACCUMULATION, f"the gradient of micro-batch {chosen} alone")
            rest = tuple((rank, micro) for rank in ranks for micro in micros if micro != chosen)
            found.setdefault(rest, (Part.ACCUMULATION, f"the mean without micro-batch {chosen}"))
    if len(ranks) > 1:
        for chosen in ranks:
            alone = tuple((chosen, micro) for micro in micros)
            found[alone] = (Part.REDUCTION, f"the gradient of rank {chosen} alone, not reduced")
            rest = tuple((rank, micro) for rank in ranks for micro in micros if rank != chosen)
            found.setdefault(rest, (Part.REDUCTION, f"the mean without rank {chosen}"))
    return found


def is_close_to_mean(actual: Tensor, terms: Sequence[Tensor], factor: float, reduce_dtype: torch.dtype) -> bool:
    """Return whether ``actual`` equals ``factor`` times the mean of ``terms``, up to rounding in ``reduce_dtype``."""
    mean, bound = mean_and_bound(list(terms), reduce_dtype, actual.dtype)
    return bool(((actual.double() - factor * mean).abs() <= factor * bound).all())


def is_rounded_to(narrow_dtype: torch.dtype, actual: Tensor, terms: Sequence[Tensor]) -> bool:
    """Return whether ``actual`` looks like a mean that was reduced in ``narrow_dtype``.

    For this, ``actual`` has to lie within the rounding bound of such a reduction. In addition, either its elements, or
    its elements times the number of terms, have to be representable in ``narrow_dtype``.
    """
    if unit_roundoff(actual.dtype) >= unit_roundoff(narrow_dtype) or is_gamma_undefined(len(terms), narrow_dtype):
        return False
    mean, bound = mean_and_bound(list(terms), narrow_dtype)
    near = bool(((actual.double() - mean).abs() <= bound).all())
    total = (actual.double() * len(terms)).to(actual.dtype)
    return near and any(torch.equal(numbers.to(narrow_dtype).to(actual.dtype), numbers) for numbers in (actual, total))


def is_gamma_undefined(terms: int, dtype: torch.dtype) -> bool:
    """Return whether ``terms`` is too large a number of terms for the sum to have a rounding bound in ``dtype``."""
    return (terms + 1) * unit_roundoff(dtype) >= 1


def fit_scale(actual: Tensor, terms: Sequence[Tensor]) -> float | None:
    """Return the factor f for which f times the mean of ``terms`` is closest to ``actual``, or None if f fits badly.

    The fit is by least squares. The factor fits badly if more than the share ``MAX_UNEXPLAINED_ERROR`` of the error
    remains.
    """
    mean, _ = mean_and_bound(list(terms), actual.dtype)
    got = actual.double()
    norm = float((mean * mean).sum())
    factor = float((got * mean).sum()) / norm if norm > 0 else math.nan
    error, left = float((got - mean).norm()), float((got - factor * mean).norm())
    return factor if math.isfinite(factor) and left <= MAX_UNEXPLAINED_ERROR * error else None
