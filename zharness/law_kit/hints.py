"""Hints about the cause of a mismatch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zharness.parity import Comparison


def hint_unmoved(comparison: Comparison, before: Tensor, after: Tensor) -> Comparison:
    """Add a hint to a mismatch of a weight that the step did not move at all."""
    return add_hint(comparison, "the step did not move this parameter") if torch.equal(before, after) else comparison


def add_hint(comparison: Comparison, hint: str) -> Comparison:
    """Return ``comparison`` with ``hint`` if it is a mismatch, else unchanged."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))
