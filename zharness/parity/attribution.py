"""What a wrong gradient looks like: the part of the step that would make it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zharness.parity.bounds import mean_and_bound
from zharness.parity.facts import Comparison, Mismatch, Part

# terms[rank][micro-step]: the local gradients of one parameter
Terms = Sequence[Sequence[Tensor]]


def attribute(comparison: Comparison, actual: Tensor, terms: Terms, copies: Sequence[Tensor]) -> Comparison:
    """``comparison`` with the part and the hint that explain its mismatch best; unchanged where it has none.

    ``actual`` is the copy that was compared, ``copies`` the full gradient as every rank reports it.
    """
    if comparison.mismatch is None:
        return comparison
    part, hint = explain(actual, terms, copies, comparison.mismatch)
    return replace(comparison, mismatch=replace(comparison.mismatch, part=part, hint=hint))


def explain(actual: Tensor, terms: Terms, copies: Sequence[Tensor], mismatch: Mismatch) -> tuple[Part, str]:
    """The first of the known ways to be wrong that gives just these numbers; a local gradient when none does."""
    for candidate, (part, hint) in candidates(terms).items():
        expected, bound = mean_and_bound([terms[rank][micro] for rank, micro in candidate], actual.dtype)
        if close(actual, expected, bound):
            return part, hint
    if any(not torch.equal(copies[0], copy) for copy in copies[1:]):
        return Part.REDUCTION, "the ranks report different gradients"
    everything, bound = mean_and_bound([term for row in terms for term in row], actual.dtype)
    factor = scale_of(actual, everything, bound)
    if factor is not None and close(actual, factor * everything, abs(factor) * bound * 2):
        return Part.REDUCTION, f"it is {factor:.9g} x the right gradient"
    if mismatch.owner is not None and mismatch.wrong < mismatch.total:
        return Part.REDUCTION, f"only {mismatch.wrong} of {mismatch.total} elements are wrong"
    return Part.LOCAL_GRADIENT, ""


def candidates(terms: Terms) -> Mapping[tuple[tuple[int, int], ...], tuple[Part, str]]:
    """Subsets of the (rank, micro-step) terms whose mean an engine with a known fault returns, and that fault."""
    ranks, micros = range(len(terms)), range(len(terms[0]))
    found: dict[tuple[tuple[int, int], ...], tuple[Part, str]] = {}
    if len(micros) > 1:
        for kept in micros:
            subset = tuple((rank, kept) for rank in ranks)
            found[subset] = (Part.ACCUMULATION, f"it is the gradient of micro-batch {kept} alone")
        for lost in micros:
            subset = tuple((rank, micro) for rank in ranks for micro in micros if micro != lost)
            found.setdefault(subset, (Part.ACCUMULATION, f"it is the mean without micro-batch {lost}"))
    if len(ranks) > 1:
        for kept in ranks:
            subset = tuple((kept, micro) for micro in micros)
            found[subset] = (Part.REDUCTION, f"it is the gradient of rank {kept} alone, not reduced")
        for lost in ranks:
            subset = tuple((rank, micro) for rank in ranks for micro in micros if rank != lost)
            found.setdefault(subset, (Part.REDUCTION, f"it is the mean without rank {lost}"))
    return found


def close(actual: Tensor, expected: Tensor, bound: Tensor) -> bool:
    """Whether every element is within ``bound``."""
    return bool(((actual.double() - expected).abs() <= bound).all())


def scale_of(actual: Tensor, expected: Tensor, bound: Tensor) -> float | None:
    """The factor that the largest expected element suggests.

    None where all are zero, where it is not finite, and where that element's own bound explains it.
    """
    if expected.numel() == 0 or not bool((expected != 0).any()):
        return None
    flat = int(expected.abs().argmax())
    want, got = float(expected.flatten()[flat]), float(actual.flatten()[flat])
    if not math.isfinite(got) or abs(got - want) <= 2 * float(bound.flatten()[flat]):
        return None
    return got / want
