"""The collectives of one process group, counted and logged: the only place that measures communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor


class Collective(Enum):
    """The collectives that a sharded engine needs; the value is how often each element crosses the wire."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"

    @property
    def passes(self) -> int:
        """An all-reduce is a reduce-scatter and an all-gather; the others pass once (ZeRO paper, section 7)."""
        return 2 if self is Collective.ALL_REDUCE else 1


@dataclass(frozen=True)
class Tally:
    """How often one collective ran in one dtype, and on how many elements of the full (unsharded) tensor."""

    calls: int = 0
    elements: int = 0

    def add_call(self, elements: int) -> Tally:
        return Tally(self.calls + 1, self.elements + elements)


# torch 2.13 deprecates the older name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Elements of a shard from which gloo's copies cost more than a collective of its own for each rank: on 2 ranks 0.7 ms
# against 1.1 for 64 elements, as long for 2**16, 11 ms against 9 for 2**20.
MIN_BROADCAST_ELEMENTS = 2**16

Observer = Callable[[Collective, Tensor], None]


class Comm:
    """Blocking collectives over ``group`` (the default group when None), with one tally per collective and dtype.

    World size 1 takes the same path: the collectives run and are counted, they only move nothing. ``observer`` is
    called with each collective and its full tensor before it runs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, observer: Observer | None = None) -> None:
        self.group = group
        self._observer = observer
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._gloo = dist.get_backend(group) == "gloo"
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # broadcast's group_src is torch 2.6
        self._tallies: dict[tuple[Collective, torch.dtype], Tally] = {}

    @property
    def tallies(self) -> Mapping[tuple[Collective, torch.dtype], Tally]:
        """What ran so far; a read-only view."""
        return MappingProxyType(self._tallies)

    def reset(self) -> None:
        """Forget what ran so far."""
        self._tallies.clear()

    def logical_bytes(self) -> float:
        """Bytes one rank must send: full bytes x passes x (N-1)/N, summed over what ran."""
        share = (self.world_size - 1) / self.world_size
        return share * sum(
            tally.elements * dtype.itemsize * kind.passes for (kind, dtype), tally in self._tallies.items()
        )

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``tensor`` in place over all ranks; any shape."""
        self._count(Collective.ALL_REDUCE, tensor)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, full: Tensor, shard: Tensor) -> Tensor:
        """Fill ``full`` (1-D, N x len(shard)) with every rank's ``shard`` (1-D, contiguous), in rank order."""
        self._count(Collective.ALL_GATHER, full)
        if self._gloo and full.device.type == "cpu" and shard.numel() >= MIN_BROADCAST_ELEMENTS:
            # gloo's own goes through two more buffers, and takes three times as long as each rank's part sent to where
            # it belongs: 15 ms against 5 for 20 MB on 2 ranks. A short one costs what it is to begin a collective.
            parts = full.view(self.world_size, shard.numel()).unbind()
            parts[self.rank].copy_(shard)
            sent = [
                dist.broadcast(part, source, group=self.group, async_op=True)
                for source, part in zip(self._ranks, parts, strict=True)
            ]
            for work in sent:
                work.wait()
        else:
            ALL_GATHER(full, shard, group=self.group)
        return full

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        """Fill ``shard`` (1-D) with this rank's slice of the sum over ranks of ``full`` (1-D, N x len(shard))."""
        self._count(Collective.REDUCE_SCATTER, full)
        if self._gloo and full.device.type == "cpu":
            # gloo's own moves an all-reduce's bytes, twice as many as this. Ranks are added in rank order.
            received = torch.empty_like(full)
            dist.all_to_all_single(received, full, group=self.group)
            torch.sum(received.view(self.world_size, -1), dim=0, out=shard)
        else:
            dist.reduce_scatter_tensor(shard, full, group=self.group)
        return shard

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` on every rank with the one of rank ``source``."""
        self._count(Collective.BROADCAST, tensor)
        dist.broadcast(tensor, src=source, group=self.group)
        return tensor

    def _count(self, kind: Collective, full: Tensor) -> None:
        if self._observer is not None:
            self._observer(kind, full)
        key = (kind, full.dtype)
        self._tallies[key] = self._tallies.get(key, Tally()).add_call(full.numel())
