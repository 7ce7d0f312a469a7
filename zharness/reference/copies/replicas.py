"""Shard within groups of ranks, and replicate across them: HSDP, which DeepSpeed called MiCS.

The weights have several copies, and each copy is sharded over a group of consecutive ranks. Weights are all-gathered
within a copy. Gradients are reduce-scattered within each copy, and each shard is then added up over the copies. ::

    4 ranks, shard size 2      shard 0    shard 1
        copy 0                 rank 0     rank 1
        copy 1                 rank 2     rank 3
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.comm import Collective, Comm, Tally


class ReplicatedShards(Comm):
    """The collectives of the ranks that share one copy of the weights; a sum of gradients also runs over the copies.

    ``rank`` and ``world_size`` count the shards of one copy, and ``all_ranks`` has the collectives of all ranks.
    """

    def __init__(self, all_ranks: Comm, shard_size: int, device: torch.device) -> None:
        """Make the groups of all ranks. This is a collective."""
        from torch.distributed.device_mesh import init_device_mesh

        copies = all_ranks.world_size // shard_size
        groups = init_device_mesh(device.type, (copies, shard_size), mesh_dim_names=("copy", "shard"))
        super().__init__(groups.get_group("shard"))
        self._all_ranks = all_ranks
        self._across_copies = Comm(groups.get_group("copy"))

    @property
    def all_ranks(self) -> Comm:
        return self._all_ranks

    @property
    def tallies(self) -> Mapping[tuple[Collective, torch.dtype], Tally]:
        """Return the tallies within the copy, to which sums across the copies are added as all-reduces."""
        return {**super().tallies, **self._across_copies.tallies}

    def logical_bytes(self) -> float:
        """Return the bytes that one rank has to send within its copy and across the copies."""
        return super().logical_bytes() + self._across_copies.logical_bytes()

    def reset(self) -> None:
        """Set the tallies within the copy and across the copies to zero."""
        super().reset()
        self._across_copies.reset()

    def close(self) -> None:
        """Destroy the two groups, whose threads would live as long as the process.

        A DeviceMesh may take the default group for an axis of all ranks, and that one belongs to the caller. A caller
        who has destroyed the default group has destroyed all groups.
        """
        for group in (self.group, self._across_copies.group) if dist.is_initialized() else ():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        """Fill ``shard`` with this rank's slice of the sum over all ranks of ``full``."""
        return self._across_copies.all_reduce(super().reduce_scatter(shard, full))


def group_shards(all_ranks: Comm, shard_size: int | None, device: torch.device) -> Comm:
    """Return the collectives of the ranks that share one copy of the weights: all, or ``shard_size`` neighbours."""
    if shard_size in (None, all_ranks.world_size):
        return all_ranks
    assert shard_size is not None
    return ReplicatedShards(all_ranks, shard_size, device)
