"""How torch's own engines keep their state: one file of torch.save, or torch.distributed.checkpoint for shards.

Whatever interrupts a save, the checkpoint before it is whole and is found; whatever fails on one rank fails on all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.uneven_ranks.rank_errors import raise_on_all_ranks

FILE_NAME, FOLDER_NAME = "engine.pt", "engine"
PARTIAL_SUFFIX, PREVIOUS_SUFFIX = ".partial", ".previous"


@dataclass(frozen=True)
class EngineState:
    """What a checkpoint holds: the model, its optimizer and the optimizer's schedule."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR


@dataclass(frozen=True)
class CheckpointFormat:
    """How an engine saves into a folder, and loads from it. Both are collective."""

    save: Callable[[Path, EngineState], None]
    load: Callable[[Path, EngineState], None]


def save_file(path: Path, engine_state: EngineState) -> None:
    """Rank 0 writes everything, which every rank has whole; until it is complete the checkpoint before it stays.

    Raises CheckpointError, on every rank, where it cannot be written.
    """
    comm = Comm()
    if (consolidate := getattr(engine_state.optimizer, "consolidate_state_dict", None)) is not None:
        consolidate(to=0)  # of ZeroRedundancyOptimizer
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            content = {
                "model": engine_state.module.state_dict(),
                "optimizer": engine_state.optimizer.state_dict(),
                "schedule": engine_state.schedule.state_dict(),
            }
            path.mkdir(parents=True, exist_ok=True)
            torch.save(content, path / (FILE_NAME + PARTIAL_SUFFIX))
            os.replace(path / (FILE_NAME + PARTIAL_SUFFIX), path / FILE_NAME)


def load_file(path: Path, engine_state: EngineState) -> None:
    """Read on every rank, with weights_only; nothing is loaded before all ranks have read all of it, and it fits.

    Raises CheckpointError, on every rank, when there is no checkpoint, or one that is damaged, carries code or is
    another model's.
    """
    with raise_on_all_ranks(Comm()):
        if not (path / FILE_NAME).is_file():
            raise missing_checkpoint_error(path, FILE_NAME)
        content = unpickling.load_safely(path / FILE_NAME, str(path / FILE_NAME))
        require_matching_state(content, engine_state, path / FILE_NAME)
    engine_state.module.load_state_dict(content["model"])
    engine_state.optimizer.load_state_dict(content["optimizer"])
    engine_state.schedule.load_state_dict(content["schedule"])


def require_matching_state(content: Any, engine_state: EngineState, file: Path) -> None:
    """Raises CheckpointError unless ``content`` is of this model and optimizer: torch copies what fits, then raises."""
    # Not the optimizer's state_dict(): a ZeroRedundancyOptimizer has none before its ranks have consolidated it.
    parts: tuple[tuple[str, Mapping[str, Any], Callable[[Mapping[str, Any]], object]], ...] = (
        ("model", engine_state.module.state_dict(), tensor_shapes),
        ("optimizer", {"param_groups": engine_state.optimizer.param_groups}, param_group_sizes),
        ("schedule", engine_state.schedule.state_dict(), sorted),
    )
    for part, own, facts in parts:
        got = content.get(part) if isinstance(content, Mapping) else None
        if not isinstance(got, Mapping) or facts(got) != facts(own):
            raise CheckpointError(f"load from {file}: its {part} is not this engine's; expected what this engine saved")


def tensor_shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's state has to have in common with the model."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def param_group_sizes(state: Mapping[str, Any]) -> list[int]:
    """How many parameters each group of an optimizer's state has."""
    return [len(group["params"]) for group in state["param_groups"]]


def save_shards(path: Path, engine_state: EngineState) -> None:
    """Every rank writes its shards by torch.distributed.checkpoint; the folder appears when all are written.

    Raises CheckpointError, on every rank, where they cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    comm, partial = Comm(), path / (FOLDER_NAME + PARTIAL_SUFFIX)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
    try:
        save(sharded_state_dict(engine_state), checkpoint_id=partial)
    except CheckpointException as error:  # no Exception of Python's: it would pass every handler of a caller
        raise CheckpointError(f"save to {path}: {error}") from error
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Give the complete folder its name. Of the checkpoint before, one or the other is always there."""
    place, previous = path / FOLDER_NAME, path / (FOLDER_NAME + PREVIOUS_SUFFIX)
    if place.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(place, previous)
    os.replace(partial, place)
    shutil.rmtree(previous, ignore_errors=True)


def load_shards(path: Path, engine_state: EngineState) -> None:
    """Read what ``save_shards`` wrote, at any number of ranks; nothing is loaded before all ranks have read theirs.

    Raises CheckpointError, on every rank, when there is none, or a damaged one. torch's own reader is what a user of
    FSDP2 has, so it is what the laws are asked of: it reads ``.metadata`` with plain pickle (pytorch/pytorch#189308).
    Load no checkpoint that you did not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    with raise_on_all_ranks(Comm()):
        # The second after a save that died between two renames.
        found = next(
            (place for place in (path / FOLDER_NAME, path / (FOLDER_NAME + PREVIOUS_SUFFIX)) if place.is_dir()), None
        )
        if found is None:
            raise missing_checkpoint_error(path, FOLDER_NAME)
    state = clone_tensors(
        sharded_state_dict(engine_state)
    )  # the engine's own tensors would be half read when a file turns out damaged
    try:
        load(state, checkpoint_id=found)
    except CheckpointException as error:
        raise CheckpointError(
            f"load from {path}: damaged, or of another kind ({error}); expected what this engine saved"
        ) from error
    set_state_dict(
        engine_state.module,
        engine_state.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    engine_state.schedule.load_state_dict(state["schedule"])


def missing_checkpoint_error(path: Path, name: str) -> CheckpointError:
    """That there is no checkpoint."""
    return CheckpointError(
        f"load from {path}: no {name} in there; expected the folder that an engine of this kind saved"
    )


def sharded_state_dict(engine_state: EngineState) -> dict[str, Any]:
    """The state as torch.distributed.checkpoint takes it: shards, by the original names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(engine_state.module, engine_state.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": engine_state.schedule.state_dict()}


def clone_tensors(value: Any) -> Any:
    """``value``, a tensor or containers of them, with tensors of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: clone_tensors(entry) for key, entry in value.items()}
    return [clone_tensors(entry) for entry in value] if isinstance(value, list) else value


SINGLE_FILE_FORMAT = CheckpointFormat(save_file, load_file)
SHARDED_FORMAT = CheckpointFormat(save_shards, load_shards)
