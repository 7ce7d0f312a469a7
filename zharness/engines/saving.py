"""How torch's own engines keep their state: one file of torch.save, or torch.distributed.checkpoint for shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zharness.errors import UsageError

FILE, FOLDER = "engine.pt", "engine"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds: the model, its optimizer and the optimizer's schedule."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR


@dataclass(frozen=True)
class Saving:
    """How an engine saves into a folder, and loads from it. Both are collective."""

    save: Callable[[Path, Kept], None]
    load: Callable[[Path, Kept], None]


def save_file(path: Path, kept: Kept) -> None:
    """Rank 0 writes everything, which every rank has whole; until it is complete the checkpoint before it stays."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(kept.optimizer, ZeroRedundancyOptimizer):
        kept.optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        content = {
            "model": kept.module.state_dict(),
            "optimizer": kept.optimizer.state_dict(),
            "schedule": kept.schedule.state_dict(),
        }
        path.mkdir(parents=True, exist_ok=True)
        torch.save(content, path / (FILE + PARTIAL))
        os.replace(path / (FILE + PARTIAL), path / FILE)
    dist.barrier()


def load_file(path: Path, kept: Kept) -> None:
    """Read on every rank, with weights_only; nothing is loaded before all of it was read.

    Raises UsageError when there is no checkpoint; what torch.load raises for one that is damaged or carries code.
    """
    if not (path / FILE).is_file():
        raise UsageError(f"load from {path}: no {FILE} in there; expected the folder that an engine of this kind saved")
    content = torch.load(path / FILE, map_location="cpu", weights_only=True)
    kept.module.load_state_dict(content["model"])
    kept.optimizer.load_state_dict(content["optimizer"])
    kept.schedule.load_state_dict(content["schedule"])


def save_shards(path: Path, kept: Kept) -> None:
    """Every rank writes its shards by torch.distributed.checkpoint; the folder appears when all are written."""
    from torch.distributed.checkpoint.state_dict_saver import save

    path.mkdir(parents=True, exist_ok=True)
    partial, place = path / (FOLDER + PARTIAL), path / FOLDER
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    save(sharded(kept), checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
    dist.barrier()


def load_shards(path: Path, kept: Kept) -> None:
    """Read what ``save_shards`` wrote, at any number of ranks.

    Raises UsageError when there is none, or a damaged one. torch.distributed.checkpoint reads ``.metadata`` with plain
    pickle: load no checkpoint that you did not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (path / FOLDER).is_dir():
        raise UsageError(
            f"load from {path}: no {FOLDER} in there; expected the folder that an engine of this kind saved"
        )
    state = sharded(kept)
    try:
        load(state, checkpoint_id=path / FOLDER)
    except CheckpointException as error:  # no Exception of Python's: it would pass every handler of a caller
        raise UsageError(
            f"load from {path}: damaged, or of another kind ({error}); expected what this engine saved"
        ) from error
    set_state_dict(kept.module, kept.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    kept.schedule.load_state_dict(state["schedule"])


def sharded(kept: Kept) -> dict[str, Any]:
    """The state as torch.distributed.checkpoint takes it: shards, by the original names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(kept.module, kept.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": kept.schedule.state_dict()}


IN_ONE_FILE = Saving(save_file, load_file)
IN_SHARDS = Saving(save_shards, load_shards)
