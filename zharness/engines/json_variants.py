"""List variants of DeepSpeed's JSON (bucket sizes, overlap, memory layout) that must not change a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def zero_optimization(**options: Any) -> Mapping[str, Any]:
    """Return an engine variant that sets ``options`` in the section ``zero_optimization``."""
    return {"zero_optimization": options}


# One bucket size is smaller than a parameter, the other has room for a few parameters. The limits are the smallest
# allowed values, and values above the size of every model of the workload.
JSON_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "tiny_buckets": zero_optimization(reduce_bucket_size=1),
    "small_buckets": zero_optimization(reduce_bucket_size=100),
    "overlap_comm": zero_optimization(overlap_comm=True),
    "no_overlap": zero_optimization(overlap_comm=False),
    "contiguous_gradients": zero_optimization(contiguous_gradients=True),
    "scattered_gradients": zero_optimization(contiguous_gradients=False),
    "reduce_scatter": zero_optimization(reduce_scatter=True),
    "all_reduce": zero_optimization(reduce_scatter=False),
    "least_limits": zero_optimization(
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=0,
        stage3_max_live_parameters=1,
        sub_group_size=1,
    ),
    "largest_limits": zero_optimization(
        stage3_prefetch_bucket_size=10**9,
        stage3_param_persistence_threshold=10**9,
        stage3_max_live_parameters=10**9,
        sub_group_size=10**9,
    ),
}
STAGE_3_JSON_VARIANTS = ("least_limits", "largest_limits")  # their keys have no effect at other stages
