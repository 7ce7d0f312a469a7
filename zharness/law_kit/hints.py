"""Hints that a comparison gives about the cause of a mismatch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zharness.parity import Comparison


def hint_unmoved(comparison: Comparison, before: Tensor, after: Tensor) -> Comparison:
    """Say so when the wrong weight is a weight that did not move at all."""
    return add_hint(comparison, "the step did not move this parameter") if torch.equal(before, after) else comparison


def add_hint(comparison: Comparison, hint: str) -> Comparison:
    """``comparison`` with ``hint``, where it is a mismatch."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))
