"""Mutants that load damaged checkpoints."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from zharness.errors import CheckpointError
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def update_checksums(manifest: Path) -> None:
    """Write the current checksums of a checkpoint's files to its manifest."""
    content = json.loads(manifest.read_text())
    for name, measure in content["files"].items():
        if (file := manifest.parent / name).is_file():
            measure[1] = zlib.crc32(file.read_bytes())
    manifest.write_text(json.dumps(content))


@mutant(
    FaultKind.STATE,
    Target("state.refuse_damaged", Part.GATHER, variant="changed_bytes"),
    origin=Origin.BLIND_12,
)
class ComparesNoChecksums(EngineWrapper):
    """Compares the lengths of the files of a checkpoint before a load, but not their checksums."""

    def load(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for manifest in path.rglob("manifest.json"):
                with suppress(ValueError):  # the manifest itself has a changed byte, which the correct engine refuses
                    update_checksums(manifest)
        dist.barrier()
        self.base.load(path)


@mutant(
    FaultKind.STATE,
    Target("state.refuse_damaged", Part.GATHER, variant="truncated"),
    Target("state.refuse_damaged", Part.GATHER, variant="missing_file"),
    origin=Origin.STATE,
)
class RaisesOnOneRank(EngineWrapper):
    """Raises on rank 0 alone if a file of a checkpoint is missing or damaged."""

    def load(self, path: Path) -> None:
        try:
            self.base.load(path)
        except CheckpointError:
            if dist.get_rank() == 0:
                raise


@mutant(
    FaultKind.STATE,
    Target("state.refuse_damaged", Part.GATHER, variant="truncated", parameter="*: *"),
    Target("state.refuse_damaged", Part.GATHER, variant="missing_file", parameter="*: *"),
    origin=Origin.STATE,
)
class IgnoresDamage(EngineWrapper):
    """Loads nothing, and raises nothing, if a file of a checkpoint is missing or damaged."""

    def load(self, path: Path) -> None:
        with suppress(CheckpointError):
            self.base.load(path)


@mutant(
    FaultKind.STATE,
    Target("state.refuse_damaged", Part.GATHER, variant="truncated", parameter="*: first.weight"),
    origin=Origin.STATE,
)
class OverwritesBeforeItRaises(EngineWrapper):
    """Sets a weight to zero before it raises an error about a missing or damaged file of a checkpoint."""

    def load(self, path: Path) -> None:
        try:
            self.base.load(path)
        except CheckpointError:
            with torch.no_grad():
                next(iter(self.module.parameters())).zero_()
            raise
