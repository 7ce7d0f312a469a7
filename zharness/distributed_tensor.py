"""Provide DTensor and its placements, which are public since torch 2.5; torch 2.4 has them in a private module.

Import this module only where a DTensor can occur: torch's package takes about a second.
"""

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        DTensor,
        Replicate,
        Shard,
        distribute_tensor,
    )

__all__ = ["DTensor", "Replicate", "Shard", "distribute_tensor"]
