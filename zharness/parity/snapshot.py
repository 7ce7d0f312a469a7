"""What the ranks saw, written by each rank and read by the judge."""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.errors import EngineContractError
from zharness.parity.contamination import Conditions

LENGTH = 8  # bytes that tell the length of what is told
WIDEST = 16  # bytes of the widest dtype that torch has
LARGE = 1 << 20  # bytes from which on a file is worth its making


@dataclass(frozen=True)
class Snapshot:
    """Tensors that one rank recorded under ``label`` at ``step``, on CPU."""

    label: str
    step: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Evidence:
    """Everything one rank recorded: its snapshots in order, who owns what, and what its numbers were computed under."""

    snapshots: tuple[Snapshot, ...]
    layout: Mapping[str, tuple[Piece, ...]]
    conditions: Conditions = field(default_factory=lambda: Conditions({}, ()))

    def get(self, label: str, step: int = 0) -> Mapping[str, Tensor]:
        """The tensors recorded under ``label`` at ``step``. Raises EngineContractError when there are none."""
        for snapshot in self.snapshots:
            if snapshot.label == label and snapshot.step == step:
                return snapshot.tensors
        raise EngineContractError(f"nothing was recorded under {label!r} at step {step}")


def path_of(room: Path, rank: int) -> Path:
    """Where ``rank`` writes its evidence."""
    return room / f"evidence.{rank}"


def write(room: Path, rank: int, evidence: Evidence) -> None:
    """Write ``evidence``: the bytes of all its tensors, what it holds as JSON, and how long that is.

    Not by torch.save: its archives take three times as long to write and to read. Nor from one copy of all tensors:
    those of a large model are on disk already, and memory holds one at a time.
    """
    with path_of(room, rank).open("wb") as file:
        shelf = Shelf(file)
        told = {
            "snapshots": [[item.label, item.step, shelf.put(item.tensors)] for item in evidence.snapshots],
            "layout": {
                name: [[piece.rank, piece.start, piece.stop] for piece in pieces]
                for name, pieces in evidence.layout.items()
            },
            "settings": dict(evidence.conditions.settings),
            "replaced": list(evidence.conditions.replaced),
        }
        words = json.dumps(told).encode()
        file.write(words + len(words).to_bytes(LENGTH, "little"))


def read(room: Path, rank: int) -> Evidence:
    """The evidence that ``rank`` wrote. Tensors are read from their file when they are looked at."""
    path = path_of(room, rank)
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - LENGTH)
        length = int.from_bytes(file.read(), "little")
        file.seek(size - LENGTH - length)
        told = json.loads(file.read(length))
    shelf = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return Evidence(
        tuple(Snapshot(label, step, taken(shelf, places)) for label, step, places in told["snapshots"]),
        {name: tuple(Piece(*piece) for piece in pieces) for name, pieces in told["layout"].items()},
        Conditions(told["settings"], tuple(told["replaced"])),
    )


class Shelf:
    """Tensors as bytes in a file, one after the other; one that comes again lies there once."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._length = 0
        self._starts: dict[int, int] = {}  # by id, of tensors that the evidence keeps alive

    def put(self, tensors: Mapping[str, Tensor]) -> list[list[Any]]:
        """Add ``tensors``; name, dtype, shape and first byte of each."""
        return [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._add(tensor)]
            for name, tensor in tensors.items()
        ]

    def _add(self, tensor: Tensor) -> int:
        if id(tensor) in self._starts:
            return self._starts[id(tensor)]
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start = self._length
        self._file.write(flat.numpy().data)
        # A view of another dtype has to begin at a multiple of its element's size.
        padding = -flat.numel() % WIDEST
        self._file.write(bytes(padding))
        self._length += flat.numel() + padding
        self._starts[id(tensor)] = start
        return start


def set_aside(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` on CPU; a large one in a file without a name, of which memory need not hold all at once.

    So what a rank records grows on disk, and its memory with the model alone. Raises OSError where the temporary folder
    has no room for it.
    """
    size = tensor.numel() * tensor.element_size()
    if size < LARGE:
        return tensor.detach().to("cpu", copy=True)
    with tempfile.TemporaryFile(buffering=0) as file:
        reserve(file.fileno(), size)
        held = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(held, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def reserve(file: int, size: int) -> None:
    """Give an empty file its blocks now: a write into a map whose disk is full would end the process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def taken(shelf: Tensor, places: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    """The tensors that lie at ``places``; they share the shelf's memory."""
    found = {}
    for name, dtype_name, shape, start in places:
        dtype: torch.dtype = getattr(torch, dtype_name)
        stop = start + math.prod(shape) * dtype.itemsize
        found[name] = shelf[start:stop].view(dtype).view(shape)
    return found
