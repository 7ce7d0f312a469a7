"""Gather the full tensors of many DTensors in few collectives, because ``DTensor.full_tensor`` runs some for each.

Each rank computes from the placements which block of a tensor every rank of the mesh has. ``full_tensor`` gathers a
DTensor whose parts are no blocks, such as a DTensor of partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zharness.comm import Comm, join
from zharness.errors import EngineContractError
from zharness.mesh import find_chunk
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE
from zharness.reference.inspection.coalesced_collectives import coalesce_keys
from zharness.reference.layout import all_gather_rows, pad_flat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zharness.distributed_tensor import DTensor

Block = tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """A mesh axis over whose ``ranks`` a dimension of a tensor is split in chunks."""

    axis: int
    ranks: int
    dimension: int


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (collective), or any other tensor, such as a step count, unchanged."""
    return gather_full_tensors([tensor])[0]


@torch.no_grad()
def gather_full_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the full tensor of each DTensor, and any other tensor unchanged. This is a collective for DTensors.

    Raises EngineContractError if this rank's part of a DTensor does not have the size that follows from the placements.
    """
    from zharness.distributed_tensor import DTensor

    full = dict(enumerate(tensors))
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], dict[int, DTensor]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor):
            continue
        splits = find_splits(tuple(tensor.device_mesh.shape), tensor.placements)
        if splits is None:
            full[index] = tensor.full_tensor()
        else:
            axes = tuple(sorted(split.axis for split in splits))
            alike.setdefault((tensor.device_mesh, axes), {})[index] = tensor
    for (mesh, axes), group in alike.items():
        full |= gather_over_axes(group, mesh, axes)
    return list(full.values())


@cache
def find_splits(mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[Split, ...] | None:
    """Return the splits of a DTensor in the order in which they are made, or None if its parts are no blocks.

    Tensor parallelism splits a tensor first, and FSDP splits the parts, although FSDP's axis comes before tp in the
    mesh. FSDP's placement is then a _StridedShard; its ``split_factor`` is the number of parts that the axes behind
    FSDP's axis have made.
    """
    in_order: list[Split] = []
    strided: list[Split] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            return None
        split = Split(axis, mesh_shape[axis], placement.dim)
        behind = [other.ranks for other in (*in_order, *strided) if other.dimension == split.dimension]
        if not hasattr(placement, "split_factor"):
            in_order.insert(0, split)
        elif placement.split_factor == math.prod(behind):
            strided.append(split)
        else:
            return None
    return (*in_order, *strided)


@cache
def list_blocks(shape: tuple[int, ...], splits: tuple[Split, ...]) -> dict[tuple[int, ...], Block]:
    """Return the block of a tensor at each coordinate on the axes that split it, in the order of the axes."""
    by_axis = sorted(splits, key=lambda split: split.axis)
    blocks = {}
    for coordinates in product(*(range(split.ranks) for split in by_axis)):
        spans = [range(size) for size in shape]
        for split in splits:
            position = coordinates[by_axis.index(split)]
            spans[split.dimension] = find_chunk(spans[split.dimension], split.ranks, position)
        blocks[coordinates] = tuple(slice(span.start, span.stop) for span in spans)
    return blocks


def count_elements(block: Block) -> int:
    """Return the number of elements of a block."""
    return math.prod(part.stop - part.start for part in block)


def gather_over_axes(tensors: Mapping[int, DTensor], mesh: DeviceMesh, axes: tuple[int, ...]) -> dict[int, Tensor]:
    """Return the full tensors of DTensors that are split over ``axes`` of ``mesh``. This is a collective."""
    own = tuple(mesh.get_local_rank(axis) for axis in axes)
    ranks = math.prod(mesh.size(axis) for axis in axes)
    parts = {key: tensor.to_local() for key, tensor in tensors.items()}
    blocks = {}
    for key, tensor in tensors.items():
        splits = find_splits(tuple(mesh.shape), tensor.placements)
        assert splits is not None, "the caller gathers other DTensors by full_tensor"
        blocks[key] = list_blocks(tuple(tensor.shape), splits)
        if parts[key].numel() != count_elements(blocks[key][own]):
            found = f"a DTensor of shape {tuple(tensor.shape)} and placements {tensor.placements}"
            expected = count_elements(blocks[key][own])
            raise EngineContractError(f"{found} has {parts[key].numel()} elements on this rank, expected {expected}")
    lengths = {key: max(map(count_elements, found.values())) for key, found in blocks.items()}
    full = {}
    for keys in coalesce_keys(parts, lengths, DEFAULT_BUCKET_SIZE // ranks):
        rows = join([pad_flat(parts[key], lengths[key]) for key in keys])
        length = rows.numel()
        for axis in reversed(axes):
            rows = all_gather_rows(rows.flatten(), Comm(mesh.get_group(axis)))
        columns = torch.split(rows.view(ranks, length), [lengths[key] for key in keys], dim=1)
        for key, column in zip(keys, columns, strict=True):
            full[key] = assemble(tuple(tensors[key].shape), list(blocks[key].values()), column)
    return full


def assemble(shape: tuple[int, ...], blocks: Sequence[Block], rows: Tensor) -> Tensor:
    """Return the full tensor from ``rows``; each row begins with the elements of one block."""
    full = rows.new_empty(shape)
    for block, row in zip(blocks, rows, strict=True):
        target = full[block]
        target.copy_(row[: target.numel()].view(target.shape))
    return full
