"""What the ranks saw, written by each rank and read by the judge."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.errors import EngineContractError
from zharness.parity.contamination import Conditions

WIDEST = 16  # bytes of the widest dtype that torch has


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
    """Write ``evidence``: how long the JSON is, the JSON of what it holds, and the bytes of all its tensors in a row.

    Not by torch.save: its archives take three times as long to write and to read.
    """
    shelf = Shelf()
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
    head = len(words).to_bytes(WIDEST, "big") + words + b" " * (-len(words) % WIDEST)
    path_of(room, rank).write_bytes(shelf.after(head))


def read(room: Path, rank: int) -> Evidence:
    """The evidence that ``rank`` wrote."""
    found = bytearray(path_of(room, rank).read_bytes())
    length = int.from_bytes(found[:WIDEST], "big")
    plain = json.loads(found[WIDEST : WIDEST + length])
    begin = WIDEST + length + -length % WIDEST
    shelf = torch.frombuffer(found, dtype=torch.uint8)[begin:]
    return Evidence(
        tuple(Snapshot(label, step, taken(shelf, places)) for label, step, places in plain["snapshots"]),
        {name: tuple(Piece(*piece) for piece in pieces) for name, pieces in plain["layout"].items()},
        Conditions(plain["settings"], tuple(plain["replaced"])),
    )


class Shelf:
    """Tensors as bytes, one after the other."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._length = 0

    def put(self, tensors: Mapping[str, Tensor]) -> list[list[Any]]:
        """Add ``tensors``; name, dtype, shape and first byte of each."""
        return [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._add(tensor)]
            for name, tensor in tensors.items()
        ]

    def after(self, head: bytes) -> bytearray:
        """``head`` and all of them."""
        both = bytearray(len(head) + self._length)
        begin = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        torch.cat([begin, *self._parts], out=torch.frombuffer(both, dtype=torch.uint8))
        return both

    def _add(self, tensor: Tensor) -> int:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        # A view of another dtype has to begin at a multiple of its element's size.
        padding = torch.zeros(-flat.numel() % WIDEST, dtype=torch.uint8)
        start = self._length
        self._parts += [flat, padding]
        self._length += flat.numel() + padding.numel()
        return start


def taken(shelf: Tensor, places: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    """The tensors that lie at ``places``; they share the shelf's memory."""
    found = {}
    for name, dtype_name, shape, start in places:
        dtype: torch.dtype = getattr(torch, dtype_name)
        stop = start + math.prod(shape) * dtype.itemsize
        found[name] = shelf[start:stop].view(dtype).view(shape)
    return found
