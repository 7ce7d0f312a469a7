"""Mutants that are wrong if the number of ranks that load a checkpoint differs from the number that saved it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

SIZE_FILE = "world_size.txt"  # in the folder of a checkpoint: the number of ranks that saved it


class NotesTheWorldSize(EngineWrapper):
    """The base class of mutants that write the number of ranks beside each checkpoint."""

    def save(self, path: Path) -> None:
        self.base.save(path)
        if dist.get_rank() == 0:
            (path / SIZE_FILE).write_text(str(dist.get_world_size()), encoding="utf-8")
        dist.barrier()

    def saved_ranks(self, path: Path) -> int:
        """Return the number of ranks that saved the checkpoint in ``path``, or the world size if it is unknown."""
        file = path / SIZE_FILE
        return int(file.read_text(encoding="utf-8")) if file.exists() else dist.get_world_size()


@mutant(
    FaultKind.STATE,
    Target("state.other_world_size", Part.GATHER, variant="more", parameter="seen"),
    origin=Origin.BLIND_11,
)
class NewRanksKeepTheirBuffers(NotesTheWorldSize):
    """Does not load buffers on ranks that did not exist when the checkpoint was saved."""

    def load(self, path: Path) -> None:
        own = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        self.base.load(path)
        for buffer, value in own if dist.get_rank() >= self.saved_ranks(path) else ():
            buffer.copy_(value)


@mutant(
    FaultKind.STATE,
    Target("state.other_world_size", Part.OPTIMIZER, variant="more", parameter="*/step"),
    Target("state.other_world_size", Part.OPTIMIZER, variant="fewer", parameter="*/step"),
    origin=Origin.BLIND_11,
)
class OtherRanksRestartCounts(NotesTheWorldSize):
    """Resets the optimizer's step counts at load if another number of ranks saved the checkpoint."""

    stages = (2,)

    def load(self, path: Path) -> None:
        self.base.load(path)
        for state in self.optimizer.state.values() if self.saved_ranks(path) != dist.get_world_size() else ():
            if "step" in state:
                state["step"].zero_()


@mutant(
    FaultKind.STATE,
    Target("state.other_world_size", Part.FORWARD, variant="more", parameter="generator"),
    Target("state.other_world_size", Part.FORWARD, variant="fewer", parameter="generator"),
    origin=Origin.BLIND_11,
)
class OtherRanksSeedTheGenerator(NotesTheWorldSize):
    """Seeds torch's generator at load if another number of ranks saved the checkpoint."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        if self.saved_ranks(path) != dist.get_world_size():
            torch.manual_seed(self.saved_ranks(path))
