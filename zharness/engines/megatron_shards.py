"""Read and write full tensors of Megatron-FSDP, which shards by rows wherever its flat buffers are cut.

A rank may have no rows of a weight, and the ranks have different numbers of rows. torch's ``DTensor.full_tensor`` and
``distribute_tensor`` expect the rows that ``torch.chunk`` gives each rank, so neither of them works here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.comm import Comm, all_gather_objects
from zharness.engines.protocol import Piece
from zharness.engines.torch_access import copy_into_shard, copy_shard


def find_pieces(params: Mapping[str, nn.Parameter]) -> dict[str, tuple[Piece, ...]]:
    """Return the flat elements that each rank owns of each sharded parameter, which is a DTensor of the package.

    Each parameter has an entry for every rank of the world, which may be empty. A parameter that every rank has whole
    is left out. This is a collective.
    """
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    own = {}
    for name, param in params.items():
        dtensor: Any = param.data
        if any(placement.is_shard() for placement in dtensor.placements):
            offsets = gather_and_compute_chunk_metadata(dtensor).offsets
            start = offsets[0] * math.prod(param.shape[1:])
            own[name] = (start, start + dtensor.to_local().numel())
    views = all_gather_objects(own, Comm())
    return {name: tuple(Piece(rank, *view[name]) for rank, view in enumerate(views)) for name in own}


def gather(local: Tensor, shape: torch.Size, pieces: tuple[Piece, ...], own_copy: range) -> Tensor:
    """Return the full tensor on CPU from the piece of each rank; this rank has ``local``. This is a collective.

    The full tensor is joined from the ranks ``own_copy``, which together have one copy of all shards. All other ranks
    have further copies.
    """
    comm, longest = Comm(), max(piece.stop - piece.start for piece in pieces)
    padded = torch.zeros(longest, dtype=local.dtype, device=local.device)
    padded[: local.numel()] = local.flatten()
    parts = comm.all_gather(padded.new_empty(len(pieces) * longest), padded).view(len(pieces), longest)
    full = torch.empty(shape.numel(), dtype=local.dtype)
    for piece in (pieces[rank] for rank in own_copy):
        full[piece.start : piece.stop] = parts[piece.rank, : piece.stop - piece.start].cpu()
    return full.view(shape)


def own_part(full: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Return this rank's piece of a full tensor, flat."""
    piece = pieces[Comm().rank]
    return full.flatten()[piece.start : piece.stop]


def copy_own_part(tensor: Tensor | None) -> Tensor:
    """Return a flat copy on CPU of this rank's part of ``tensor``, which is empty if the rank has none."""
    return torch.empty(0) if tensor is None else copy_shard(tensor)


def write_own_part(tensor: Tensor | None, value: Tensor) -> None:
    """Copy a flat tensor into this rank's part of ``tensor``, if the rank has one."""
    if tensor is not None:
        copy_into_shard(tensor, value)
