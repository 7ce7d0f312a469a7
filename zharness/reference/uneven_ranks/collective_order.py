"""Detect at each step, by one checksum, that ranks ran different collectives at stage 3."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zharness.comm import Comm
from zharness.errors import UsageError


class CollectiveOrder:
    """A checksum of the order, kinds, parameters and dtypes of this rank's collectives since the last check."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._checksum = 0

    def record(self, kind: int, param_indices: Sequence[int], dtype: torch.dtype) -> None:
        """Add one collective to the checksum."""
        self._checksum = zlib.crc32(repr((kind, list(param_indices), str(dtype))).encode(), self._checksum)

    def check_same_on_all_ranks(self, device: torch.device) -> None:
        """Compare the checksums of all ranks, and start new checksums. This is a collective.

        ``device`` is the device of the compared tensors. Raises UsageError on every rank if the checksums differ,
        because collectives on different parameters of equal shapes succeed silently and mix their values.
        """
        local = torch.tensor([self._checksum], device=device)
        self._checksum = 0
        checksums = self._comm.all_gather(local.new_empty(self._comm.world_size), local).tolist()
        different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        if different:
            raise UsageError(
                f"rank {', '.join(map(str, different))} used different parameters than rank 0, or in another order, "
                "since the last step, and their values and gradients were mixed: call zero_grad(), and run forwards "
                "and backwards that differ between ranks inside `with engine.uneven():`"
            )
