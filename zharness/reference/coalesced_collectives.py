"""Tensors that cross the wire for a caller, many at once: a collective costs the same for one element as for many.

What is gathered to be looked at, and what rank 0 gives to all. Training's own way over the wire is in ``buckets``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE
from zharness.reference.layout import ShardLayout, all_gather_rows, pad_flat

K = TypeVar("K")


@torch.no_grad()
def all_gather_full_tensors(shards: Mapping[K, tuple[Tensor, ShardLayout]], comm: Comm) -> dict[K, Tensor]:
    """The full tensors on the CPU, in the order of ``shards``, from every rank's shard of each (padded or not).

    Collective: ``shards`` has the same keys in the same order on every rank.
    """
    full: dict[K, Tensor] = {}
    # By the padded lengths, which the ranks agree in: what the last ones own is shorter.
    lengths = {key: layout.shard_length for key, (_, layout) in shards.items()}
    for keys in _coalesce_keys(
        {key: shard for key, (shard, _) in shards.items()}, lengths, DEFAULT_BUCKET_SIZE // comm.world_size
    ):
        rows = all_gather_rows(torch.cat([pad_flat(shards[key][0], lengths[key]) for key in keys]), comm)
        for key, part in zip(keys, torch.split(rows, [lengths[key] for key in keys], dim=1), strict=True):
            layout = shards[key][1]
            whole = part.reshape(-1)[: layout.numel].view(layout.shape)
            # A part one element wide is a column of the rows, whose stride a copy would keep.
            full[key] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {key: full[key] for key in shards}


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, source: int = 0) -> None:
    """Make each tensor on every rank what it is on rank ``source``. Collective."""
    found = dict(enumerate(tensors))
    lengths = {key: tensor.numel() for key, tensor in found.items()}
    for keys in _coalesce_keys(found, lengths, DEFAULT_BUCKET_SIZE):
        # A copy also of one alone: gloo lets go of what it has sent a moment later, and what is lent is counted then.
        flat = torch.cat([found[key].detach().reshape(-1) for key in keys])
        if flat.numel():
            comm.broadcast(flat, source)
        for key, part in zip(keys, torch.split(flat, [lengths[key] for key in keys]), strict=True):
            found[key].copy_(part.view(found[key].shape))


def _coalesce_keys(tensors: Mapping[K, Tensor], lengths: Mapping[K, int], max_elements: int) -> Iterator[list[K]]:
    """The keys of what crosses the wire together: one dtype and device, at most ``size`` elements or one tensor.

    ``lengths`` are the same on all ranks, or they would cut in different places.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[K]] = {}
    for key, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(key)
    for keys in alike.values():
        pack: list[K] = []
        elements = 0
        for key in keys:
            if pack and elements + lengths[key] > max_elements:
                yield pack
                pack, elements = [], 0
            pack.append(key)
            elements += lengths[key]
        yield pack
