"""Compare an engine's recorded tensors with the baseline, within error bounds that follow from the arithmetic."""

from zharness.parity.compare import compare_bitwise, compare_ranks, compare_within_bound, compare_within_range
from zharness.parity.comparison import Comparison, Mismatch, Part, Tier
from zharness.parity.contamination import require_no_shared_memory
from zharness.parity.snapshot import RankEvidence, Snapshot

__all__ = [
    "Comparison",
    "Mismatch",
    "Part",
    "RankEvidence",
    "Snapshot",
    "Tier",
    "compare_bitwise",
    "compare_ranks",
    "compare_within_bound",
    "compare_within_range",
    "require_no_shared_memory",
]
