"""Run one collective for many tensors, because many small collectives are slow.

The functions copy full tensors to the CPU for the user, and broadcast one rank's values. Training itself uses the
module ``buckets``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from zharness.comm import Comm, join
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE
from zharness.reference.layout import ShardLayout, all_gather_rows, pad_flat

K = TypeVar("K")


@torch.no_grad()
def all_gather_full_tensors(shards: Mapping[K, tuple[Tensor, ShardLayout]], comm: Comm) -> dict[K, Tensor]:
    """Return full tensors on the CPU, all-gathered from every rank's shards. This is a collective.

    ``shards`` maps each key to this rank's shard, padded or not, and its layout. The keys and their order must be the
    same on every rank.
    """
    full: dict[K, Tensor] = {}
    # The padded lengths are the same on all ranks; the last ranks own fewer elements.
    lengths = {key: layout.shard_length for key, (_, layout) in shards.items()}
    for keys in coalesce_keys(
        {key: shard for key, (shard, _) in shards.items()}, lengths, DEFAULT_BUCKET_SIZE // comm.world_size
    ):
        rows = all_gather_rows(join([pad_flat(shards[key][0], lengths[key]) for key in keys]), comm)
        for key, part in zip(keys, torch.split(rows, [lengths[key] for key in keys], dim=1), strict=True):
            layout = shards[key][1]
            full_tensor = part.reshape(-1)[: layout.numel].view(layout.shape)
            # Without memory_format a part one element wide, a column of the rows, would keep the rows' stride.
            full[key] = full_tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {key: full[key] for key in shards}


def all_gather_optimizer_state(
    optimizer: torch.optim.Optimizer, leaves: Mapping[str, Tensor], layouts: Mapping[str, ShardLayout], comm: Comm
) -> dict[str, dict[str, Tensor]]:
    """Return the full state of ``optimizer`` by parameter name and key, on the CPU. This is a collective.

    A state with the shape of its leaf is a shard if ``layouts`` has the parameter; all other states are copied.
    """
    states = {name: state for name, leaf in leaves.items() if (state := optimizer.state.get(leaf))}
    tensors = {
        (name, key): value for name, state in states.items() for key, value in state.items() if torch.is_tensor(value)
    }
    shards = {
        (name, key): (value, layouts[name])
        for (name, key), value in tensors.items()
        if name in layouts and value.shape == leaves[name].shape
    }
    full = all_gather_full_tensors(shards, comm)
    result: dict[str, dict[str, Tensor]] = {name: {} for name in states}
    for (name, key), value in tensors.items():
        result[name][key] = full[name, key] if (name, key) in full else value.detach().to("cpu", copy=True)
    return result


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, source: int = 0) -> None:
    """Copy each tensor of rank ``source`` to all ranks, in place. This is a collective."""
    by_index = dict(enumerate(tensors))
    lengths = {key: tensor.numel() for key, tensor in by_index.items()}
    for keys in coalesce_keys(by_index, lengths, DEFAULT_BUCKET_SIZE):
        # Copy even a single tensor: gloo releases the tensor that it sent a moment later, and the caller's tensor would
        # be counted as unsharded memory until then.
        flat = join([by_index[key].detach().reshape(-1) for key in keys])
        if flat.numel():
            comm.broadcast(flat, source)
        for key, part in zip(keys, torch.split(flat, [lengths[key] for key in keys]), strict=True):
            by_index[key].copy_(part.view(by_index[key].shape))


def coalesce_keys(tensors: Mapping[K, Tensor], lengths: Mapping[K, int], max_elements: int) -> Iterator[list[K]]:
    """Yield groups of keys whose tensors are sent in one collective.

    The tensors of a group have one dtype and device, and at most ``max_elements`` elements in all; a tensor with more
    elements is a group by itself. ``lengths`` must be the same on all ranks, since it determines the groups.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[K]] = {}
    for key, tensor in tensors.items():
        by_type.setdefault((tensor.dtype, tensor.device), []).append(key)
    for keys in by_type.values():
        group: list[K] = []
        elements = 0
        for key in keys:
            if group and elements + lengths[key] > max_elements:
                yield group
                group, elements = [], 0
            group.append(key)
            elements += lengths[key]
        yield group
