"""Snapshots of an engine against a baseline: bounds that follow from the arithmetic, and the first divergence."""

from zharness.parity.compare import between, identical, ranks_agree, within
from zharness.parity.contamination import require_apart
from zharness.parity.facts import Comparison, Mismatch, Part, Tier
from zharness.parity.snapshot import Evidence, Snapshot

__all__ = [
    "Comparison",
    "Evidence",
    "Mismatch",
    "Part",
    "Snapshot",
    "Tier",
    "between",
    "identical",
    "ranks_agree",
    "require_apart",
    "within",
]
