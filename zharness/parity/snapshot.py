"""Write and read evidence files: each rank writes the tensors that it records, and the judge reads them."""

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

INTEGER_BYTES = 8  # size of a number in the header
HEADER_BYTES = 2 * INTEGER_BYTES  # start and length of the JSON description; tensors follow the header
ALIGNMENT_BYTES = 16  # size of torch's widest dtype
TensorEntry = tuple[str, list[int], int]  # dtype, shape and first byte of a tensor in a file


@dataclass(frozen=True)
class Snapshot:
    """The tensors, on CPU, that one rank recorded under the label ``label`` at step ``step``."""

    label: str
    step: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank: its snapshots in the order of recording, the layout, and the conditions of its process.

    ``layout`` maps the name of each parameter to the ranges of elements that each rank owns.
    """

    snapshots: tuple[Snapshot, ...]
    layout: Mapping[str, tuple[Piece, ...]]
    conditions: ProcessConditions = field(default_factory=lambda: ProcessConditions({}, ()))

    def get(self, label: str, step: int = 0) -> Mapping[str, Tensor]:
        """Return the tensors that were recorded under ``label`` at ``step``.

        Raises EngineContractError if no tensors were recorded.
        """
        for snapshot in self.snapshots:
            if snapshot.label == label and snapshot.step == step:
                return snapshot.tensors
        raise EngineContractError(f"nothing was recorded under {label!r} at step {step}")


def evidence_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in which ``rank`` writes its evidence."""
    return folder / f"evidence.{rank}"


class EvidenceWriter:
    """Writes one rank's evidence file: each tensor's bytes immediately, and the descriptions of all tensors at the end.

    The use of memory does not grow with the number of snapshots, and no tensor is copied twice. torch.save is not used,
    because its archives take three times as long to write and to read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._length = file.write(bytes(HEADER_BYTES))  # a length of 0 marks an unfinished file
        file.flush()  # the file may contain the previous cell's evidence, and this rank may die
        self._snapshots: dict[tuple[str, int], dict[str, TensorEntry]] = {}

    def write_snapshot(self, label: str, step: int, tensors: Mapping[str, Tensor], base_label: str = "") -> None:
        """Write ``tensors``, which are on CPU, as the snapshot ``label`` at ``step``.

        If ``base_label`` is given, the new snapshot also contains the tensors of the snapshot ``base_label`` at
        ``step``. Raises HarnessFault if the snapshot exists already, since the judge would read only one of two
        snapshots. Raises OSError if the disk is full.
        """
        if (label, step) in self._snapshots:
            raise HarnessFault(f"{label!r} was recorded twice at step {step}")
        entries = dict(self._snapshots[base_label, step]) if base_label else {}
        self._snapshots[label, step] = entries | {name: self._write_tensor(tensor) for name, tensor in tensors.items()}

    def finish(self, layout: Mapping[str, tuple[Piece, ...]], conditions: ProcessConditions) -> None:
        """Write the descriptions of all snapshots as JSON, write its length into the header, and close the file."""
        description = {
            "snapshots": [
                [label, step, [[name, *entry] for name, entry in entries.items()]]
                for (label, step), entries in self._snapshots.items()
            ],
            "layout": {
                name: [[piece.rank, piece.start, piece.stop] for piece in pieces] for name, pieces in layout.items()
            },
            "settings": dict(conditions.settings),
            "replaced": list(conditions.replacements),
            "nondeterministic": list(conditions.nondeterministic),
        }
        encoded = json.dumps(description).encode()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(
            self._length.to_bytes(INTEGER_BYTES, "little") + len(encoded).to_bytes(INTEGER_BYTES, "little")
        )
        self._file.close()

    def _write_tensor(self, tensor: Tensor) -> TensorEntry:
        """Append the bytes of ``tensor`` to the file; return its dtype, its shape and the position of its bytes."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start, length = self._length, flat.numel()
        self._file.write(flat.numpy().data)
        # A view of another dtype has to begin at a multiple of its element's size.
        padding = -length % ALIGNMENT_BYTES
        if padding:
            self._file.write(bytes(padding))
        self._length += length + padding
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start


def open_evidence_writer(folder: Path, rank: int) -> EvidenceWriter:
    """Open the file of ``rank``'s evidence for writing.

    An existing file is overwritten in place, so that the file system does not allocate its pages again.
    """
    return EvidenceWriter(os.fdopen(os.open(evidence_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600), "wb"))


def read_evidence(folder: Path, rank: int) -> RankEvidence:
    """Read the evidence of ``rank``; tensors are memory-mapped, so their data is loaded only when it is used.

    Raises HarnessFault if the rank ended before its file was complete.
    """
    path = evidence_path(folder, rank)
    with path.open("rb") as file:
        start, length = (int.from_bytes(file.read(INTEGER_BYTES), "little") for _ in range(2))
        if not length:
            raise HarnessFault(f"rank {rank} ended before it finished its evidence file")
        file.seek(start)
        description = json.loads(file.read(length))
    mapped = torch.from_file(str(path), shared=False, size=start, dtype=torch.uint8, device="cpu")
    storage = mapped.to(torch.get_default_device())
    return RankEvidence(
        tuple(
            Snapshot(label, step, load_tensors(storage, entries)) for label, step, entries in description["snapshots"]
        ),
        {name: tuple(Piece(*piece) for piece in pieces) for name, pieces in description["layout"].items()},
        ProcessConditions(
            description["settings"], tuple(description["replaced"]), tuple(description["nondeterministic"])
        ),
    )


def load_tensors(storage: Tensor, entries: Sequence[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    """Return the tensors that ``entries`` describe as views of ``storage``."""
    tensors = {}
    for name, dtype_name, shape, start in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        stop = start + math.prod(shape) * dtype.itemsize
        tensors[name] = storage[start:stop].view(dtype).view(shape)
    return tensors
