"""What the ranks saw, written by each rank and read by the judge."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.errors import EngineContractError, HarnessFault
from zharness.parity.contamination import ProcessConditions

INTEGER_BYTES = 8  # bytes of a number at the beginning of a file
HEADER_BYTES = 2 * INTEGER_BYTES  # where what is told begins, and how long it is; the tensors follow
ALIGNMENT_BYTES = 16  # bytes of the widest dtype that torch has
TensorEntry = tuple[str, list[int], int]  # dtype, shape and first byte of a tensor in a file


@dataclass(frozen=True)
class Snapshot:
    """Tensors that one rank recorded under ``label`` at ``step``, on CPU."""

    label: str
    step: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class RankEvidence:
    """Everything one rank recorded: its snapshots in order, who owns what, and what its numbers were computed under."""

    snapshots: tuple[Snapshot, ...]
    layout: Mapping[str, tuple[Piece, ...]]
    conditions: ProcessConditions = field(default_factory=lambda: ProcessConditions({}, ()))

    def get(self, label: str, step: int = 0) -> Mapping[str, Tensor]:
        """The tensors recorded under ``label`` at ``step``. Raises EngineContractError when there are none."""
        for snapshot in self.snapshots:
            if snapshot.label == label and snapshot.step == step:
                return snapshot.tensors
        raise EngineContractError(f"nothing was recorded under {label!r} at step {step}")


def evidence_path(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes its evidence."""
    return folder / f"evidence.{rank}"


class EvidenceWriter:
    """What one rank records: the bytes of its tensors go into ``file`` as they come, what they are follows at the end.

    So memory grows with the model alone, whatever is recorded of it, and nothing is copied twice. Not by torch.save:
    its archives take three times as long to write and to read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._length = file.write(bytes(HEADER_BYTES))  # until all is told: that nothing is
        file.flush()  # now: the file may be that of the cell before, and this rank may be gone at any moment
        self._snapshots: dict[tuple[str, int], dict[str, TensorEntry]] = {}

    def write_snapshot(self, label: str, step: int, tensors: Mapping[str, Tensor], base_label: str = "") -> None:
        """Write ``tensors``, on CPU, as a snapshot; and in it, under their names, those of ``beside`` at that step.

        Raises HarnessFault when there is such a record, of which a judge would see the first alone; OSError where the
        disk is full.
        """
        if (label, step) in self._snapshots:
            raise HarnessFault(f"{label!r} was recorded twice at step {step}")
        lying = dict(self._snapshots[base_label, step]) if base_label else {}
        self._snapshots[label, step] = lying | {name: self._write_tensor(tensor) for name, tensor in tensors.items()}

    def finish(self, layout: Mapping[str, tuple[Piece, ...]], conditions: ProcessConditions) -> None:
        """Tell what was recorded, as JSON, and how long that is; the file is complete then, and closed."""
        told = {
            "snapshots": [
                [label, step, [[name, *each] for name, each in lying.items()]]
                for (label, step), lying in self._snapshots.items()
            ],
            "layout": {
                name: [[piece.rank, piece.start, piece.stop] for piece in pieces] for name, pieces in layout.items()
            },
            "settings": dict(conditions.settings),
            "replaced": list(conditions.replacements),
        }
        words = json.dumps(told).encode()
        self._file.write(words)
        self._file.seek(0)
        self._file.write(self._length.to_bytes(INTEGER_BYTES, "little") + len(words).to_bytes(INTEGER_BYTES, "little"))
        self._file.close()

    def _write_tensor(self, tensor: Tensor) -> TensorEntry:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start = self._length
        self._file.write(flat.numpy().data)
        # A view of another dtype has to begin at a multiple of its element's size.
        padding = -flat.numel() % ALIGNMENT_BYTES
        self._file.write(bytes(padding))
        self._length += flat.numel() + padding
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start


def open_evidence_writer(folder: Path, rank: int) -> EvidenceWriter:
    """Records that ``read`` finds. A file that is there is written over: new pages are most of what writing takes."""
    return EvidenceWriter(os.fdopen(os.open(evidence_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600), "wb"))


def read_evidence(folder: Path, rank: int) -> RankEvidence:
    """The evidence that ``rank`` wrote. Tensors are read from their file when they are looked at.

    Raises HarnessFault where it ended before it had told what that is.
    """
    path = evidence_path(folder, rank)
    with path.open("rb") as file:
        start, length = (int.from_bytes(file.read(INTEGER_BYTES), "little") for _ in range(2))
        if not length:
            raise HarnessFault(f"rank {rank} ended before it had told what it recorded")
        file.seek(start)
        told = json.loads(file.read(length))
    shelf = torch.from_file(str(path), shared=False, size=start, dtype=torch.uint8)
    return RankEvidence(
        tuple(Snapshot(label, step, load_tensors(shelf, places)) for label, step, places in told["snapshots"]),
        {name: tuple(Piece(*piece) for piece in pieces) for name, pieces in told["layout"].items()},
        ProcessConditions(told["settings"], tuple(told["replaced"])),
    )


def load_tensors(storage: Tensor, entries: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    """The tensors that lie at ``places``; they share the shelf's memory."""
    found = {}
    for name, dtype_name, shape, start in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        stop = start + math.prod(shape) * dtype.itemsize
        found[name] = storage[start:stop].view(dtype).view(shape)
    return found
