"""Add hints, which say what may have caused a mismatch, to mismatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zharness.law_kit.program_suspects import scatter_by_owner
from zharness.parity import Comparison
from zharness.parity.attribution import fit_scale, is_close_to_mean, is_unexplained
from zharness.parity.bounds import mean_and_bound

OLD_GRADIENT_ADDED_HINT = "the gradient that an earlier step used is added to it"
MOVED_WITHOUT_GRADIENT_HINT = "the step moved a parameter that has no gradient"
NO_STATE_HINT = "the engine has no such state"
SCALED_HINT = "it is multiplied by the loss scale"
UNREDUCED_PARTS_HINT = "each rank's part of the gradient is that rank's own, not reduced"


def explain_nothing(*_: object) -> str:
    """Return no hint."""
    return ""


def hint_factor(comparison: Comparison, found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Comparison:
    """Add a hint to a mismatch of a gradient that equals the right gradient times a factor, up to rounding."""
    mismatch = comparison.mismatch
    factor = None if mismatch is None else fit_scale(found[mismatch.parameter], [right[mismatch.parameter]])
    return comparison if factor is None else add_hint(comparison, f"it is {factor:.3g} x the right gradient")


def hint_unreduced_parts(
    comparison: Comparison, found: Tensor, rank_grads: Sequence[Tensor], reduce_dtype: torch.dtype
) -> Comparison:
    """Add a hint to a mismatch of a gradient in which the part of each rank is that rank's local gradient.

    ``found`` is the engine's gradient, and ``rank_grads`` has the right local gradient of each rank. The numbers have
    to agree up to rounding in ``reduce_dtype``.
    """
    pieces = () if comparison.location is None else comparison.location.pieces
    if comparison.mismatch is None or not pieces:
        return comparison
    is_own = is_close_to_mean(found, [scatter_by_owner(rank_grads, pieces)], 1, reduce_dtype)
    return add_hint(comparison, UNREDUCED_PARTS_HINT) if is_own else comparison


def hint_added_gradient(
    comparison: Comparison,
    found: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    local: Sequence[Mapping[str, Tensor]],
    reduce_dtype: torch.dtype,
) -> Comparison:
    """Add a hint to an unexplained mismatch of a gradient if the gradient in ``old`` was added to the right gradient.

    ``found`` are the engine's gradients, and ``local`` are the right gradients of each rank, which the engine averages
    in ``reduce_dtype``.
    """
    mismatch = comparison.mismatch
    if mismatch is None or not is_unexplained(mismatch):
        return comparison
    name = mismatch.parameter
    if name not in old or name not in found or any(name not in grads for grads in local):
        return comparison
    hint = describe_added_gradient(found[name], [[grads[name] for grads in local]], old[name], reduce_dtype)
    return add_hint(comparison, hint) if hint else comparison


def describe_added_gradient(
    found: Tensor, rows: Sequence[Sequence[Tensor]], old: Tensor, reduce_dtype: torch.dtype
) -> str:
    """Return the hint that ``old``, or a multiple of ``old``, was added to the gradient ``found``, or ''.

    The rest of the gradient is the sum of the means of ``rows``, reduced in ``reduce_dtype``. A multiple is possible
    because clipping scales the gradient that an earlier step used. The numbers have to agree in all elements. A
    gradient of one element gets no hint of a multiple, because any number is a multiple of another.
    """
    mean, bound = mean_and_bound([term for row in rows for term in row], reduce_dtype, found.dtype)
    error, wide = found.double() - len(rows) * mean, old.double()
    norm = float((wide * wide).sum())
    if norm == 0:
        return ""
    fitted = [float((error * wide).sum()) / norm] if found.numel() > 1 else []
    for factor in (1.0, *fitted):
        rounding = torch.finfo(reduce_dtype).eps * (found.double().abs() + abs(factor) * wide.abs())
        if factor > 0 and bool(((error - factor * wide).abs() <= len(rows) * bound + rounding).all()):
            return OLD_GRADIENT_ADDED_HINT if factor == 1 else f"{factor:.4g} x {OLD_GRADIENT_ADDED_HINT}"
    return ""


def hint_unmoved(comparison: Comparison, before: Tensor, after: Tensor) -> Comparison:
    """Add a hint to a mismatch of a weight if the step did not change the weight at all."""
    return add_hint(comparison, "the step did not move this parameter") if torch.equal(before, after) else comparison


def hint_became_nan(comparison: Comparison) -> Comparison:
    """Add a hint to a mismatch of a weight that a step with a finite gradient made NaN."""
    mismatch = comparison.mismatch
    if mismatch is None or not math.isnan(mismatch.actual) or not math.isfinite(mismatch.expected):
        return comparison
    return add_hint(comparison, "a weight whose gradient is finite became NaN")


def hint_step_count(comparison: Comparison, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Comparison:
    """Add a hint to a mismatch of a weight if the step did not increase the step count of its state by one."""
    if "step" not in before or "step" not in after or float(after["step"]) == float(before["step"]) + 1:
        return comparison
    return add_hint(comparison, f"its step count went from {float(before['step']):g} to {float(after['step']):g}")


def hint_learning_rate(
    comparison: Comparison, update: Tensor, grad: Tensor, hyperparameters: Mapping[str, Any]
) -> Comparison:
    """Add a hint to a mismatch of a weight if SGD with another learning rate or a scaled gradient explains the update.

    The ``update`` cannot tell these two causes apart. If the mismatch already has a hint, this hint is kept. If both
    numbers of the new hint would be printed alike, the hint is not added.
    """
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.hint or any(map(hyperparameters.get, ("momentum", "weight_decay", "maximize"))):
        return comparison
    rate, used = fit_scale(update, [-grad]), float(hyperparameters["lr"])
    if rate is None or rate <= 0 or f"{rate:.4g}" == f"{used:.4g}":
        return comparison
    hint = f"the step is as if the learning rate were {rate:.4g} in place of {used:.4g}"
    return add_hint(comparison, f"{hint}, or the gradient {rate / used:.4g} times as large" if used else hint)


def add_hint(comparison: Comparison, hint: str) -> Comparison:
    """Add ``hint`` to the mismatch of ``comparison``, if it has one, and return the comparison."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))


def set_verb_position(comparison: Comparison, position: int) -> Comparison:
    """Return ``comparison`` with ``position``, the position of the verb, as the step of its mismatch."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, step=position))
