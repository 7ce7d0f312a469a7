"""What the ranks saw, written by each rank and read by the judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.errors import EngineContractError
from zharness.parity.contamination import Conditions


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
    return room / f"evidence.{rank}.pt"


def write(room: Path, rank: int, evidence: Evidence) -> None:
    """Write ``evidence`` in plain containers, so that it can be read with ``weights_only=True``."""
    plain = {
        "snapshots": [(item.label, item.step, dict(item.tensors)) for item in evidence.snapshots],
        "layout": {
            name: [(piece.rank, piece.start, piece.stop) for piece in pieces]
            for name, pieces in evidence.layout.items()
        },
        "settings": dict(evidence.conditions.settings),
        "replaced": list(evidence.conditions.replaced),
    }
    torch.save(plain, path_of(room, rank))


def read(room: Path, rank: int) -> Evidence:
    """The evidence that ``rank`` wrote."""
    plain = torch.load(path_of(room, rank), weights_only=True)
    return Evidence(
        tuple(Snapshot(label, step, tensors) for label, step, tensors in plain["snapshots"]),
        {name: tuple(Piece(*piece) for piece in pieces) for name, pieces in plain["layout"].items()},
        Conditions(plain["settings"], tuple(plain["replaced"])),
    )
