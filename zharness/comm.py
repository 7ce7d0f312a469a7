"""Run the collectives of one process group, and count their calls and elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Collective(Enum):
    """The collectives that a sharded engine needs."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"

    @property
    def passes(self) -> int:
        """Return how often each element crosses the network: 2 for an all-reduce, else 1 (ZeRO paper, section 7).

        An all-reduce is a reduce-scatter followed by an all-gather.
        """
        return 2 if self is Collective.ALL_REDUCE else 1


@dataclass(frozen=True)
class Tally:
    """The number of calls of one collective in one dtype, and of the elements of their full (unsharded) tensors."""

    calls: int = 0
    elements: int = 0

    def add_call(self, elements: int) -> Tally:
        """Return a tally with one more call, on a full tensor of ``elements`` elements."""
        return Tally(self.calls + 1, self.elements + elements)


# torch 2.13 deprecates the name all_gather_into_tensor.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# From this number of elements of a shard on, one broadcast per rank is faster than gloo's all-gather, which copies
# through two buffers. On 2 ranks the all-gather takes 0.7 ms and the broadcasts 1.1 ms for 64 elements, equal times for
# 2**16, and 11 ms against 9 ms for 2**20.
MIN_BROADCAST_ELEMENTS = 2**16

Observer = Callable[[Collective, Tensor], None]


class Comm:
    """Blocking collectives over ``group`` (None is the default group), counted by one Tally per collective and dtype.

    At world size 1 the collectives also run and are counted, but move no bytes. ``observer`` is called with each
    collective and its full tensor before the collective runs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, observer: Observer | None = None) -> None:
        self.group = group
        self._observer = observer
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._backend = dist.get_backend(group)
        self._gloo = self._backend == "gloo"
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # broadcast's group_src is torch 2.6
        self._tallies: dict[tuple[Collective, torch.dtype], Tally] = {}

    @property
    def all_ranks(self) -> Comm:
        """The collectives over all ranks of the engine: this object."""
        return self

    @property
    def tallies(self) -> Mapping[tuple[Collective, torch.dtype], Tally]:
        """Return a read-only view of the tallies since the last ``reset``."""
        return MappingProxyType(self._tallies)

    def reset(self) -> None:
        """Set all tallies to zero."""
        self._tallies.clear()

    def logical_bytes(self) -> float:
        """Return the bytes that one rank has to send: full bytes x passes x (N-1)/N, summed over all calls."""
        share = (self.world_size - 1) / self.world_size
        return share * sum(
            tally.elements * dtype.itemsize * kind.passes for (kind, dtype), tally in self._tallies.items()
        )

    def close(self) -> None:
        """Do nothing, because the group belongs to the caller; a subclass that makes groups destroys them here."""

    @property
    def transfer_device(self) -> torch.device:
        """Return a device on which the group's backend takes tensors: the current GPU with NCCL, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``tensor``, which may have any shape, in place over all ranks, and return it."""
        self._count(Collective.ALL_REDUCE, tensor)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, full: Tensor, shard: Tensor) -> Tensor:
        """Fill ``full`` (1-D, N x len(shard)) with every rank's ``shard`` (1-D, contiguous), in rank order."""
        self._count(Collective.ALL_GATHER, full)
        if self._gloo and full.device.type == "cpu" and shard.numel() >= MIN_BROADCAST_ELEMENTS:
            # gloo's all-gather copies through two more buffers: for 20 MB on 2 ranks it takes 15 ms, and broadcasting
            # each rank's part into its place takes 5 ms. For short shards the cost of starting collectives dominates.
            parts = full.view(self.world_size, shard.numel()).unbind()
            parts[self.rank].copy_(shard)
            broadcasts = [
                dist.broadcast(part, source, group=self.group, async_op=True)
                for source, part in zip(self._ranks, parts, strict=True)
            ]
            for broadcast in broadcasts:
                broadcast.wait()
        else:
            ALL_GATHER(full, shard, group=self.group)
        return full

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        """Fill ``shard`` (1-D) with this rank's slice of the sum over ranks of ``full`` (1-D, N x len(shard))."""
        self._count(Collective.REDUCE_SCATTER, full)
        if self._gloo and full.device.type == "cpu":
            # gloo's reduce-scatter sends as many bytes as an all-reduce, twice those of an all-to-all. The ranks are
            # added in rank order.
            received = torch.empty_like(full)
            dist.all_to_all_single(received, full, group=self.group)
            torch.sum(received.view(self.world_size, -1), dim=0, out=shard)
        else:
            dist.reduce_scatter_tensor(shard, full, group=self.group)
        return shard

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` on every rank with the tensor of global rank ``source``."""
        self._count(Collective.BROADCAST, tensor)
        dist.broadcast(tensor, src=source, group=self.group)
        return tensor

    def _count(self, kind: Collective, full: Tensor) -> None:
        """Call the observer, and add one call on the tensor ``full`` to the Tally of this collective and dtype."""
        if self._observer is not None:
            self._observer(kind, full)
        key = (kind, full.dtype)
        self._tallies[key] = self._tallies.get(key, Tally()).add_call(full.numel())


def all_gather_objects(value: T, comm: Comm) -> list[T]:
    """Return a list with every rank's ``value``, in rank order. This is a collective, which is not counted."""
    values: list[Any] = [None] * comm.world_size
    dist.all_gather_object(values, value, group=comm.group)
    return values


def is_true_on_any_rank(value: bool, comm: Comm) -> bool:
    """Return whether any rank's ``value`` is true. This is a collective of one byte, which is not counted."""
    flag = torch.tensor(value, dtype=torch.uint8, device=comm.transfer_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=comm.group)
    return bool(flag)


def join(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return ``torch.cat`` of tensors of one dtype, outside torch.autocast, in which torch.cat refuses some dtypes."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.cat(list(tensors), dim)
