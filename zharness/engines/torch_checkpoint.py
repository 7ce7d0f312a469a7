"""Save and load checkpoints of torch's own engines: one file by torch.save, or shards by torch's DCP module.

An interrupted save leaves the previous checkpoint complete. A failure on one rank raises an error on all ranks.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

FILE_NAME, FOLDER_NAME = "engine.pt", "engine"
PARTIAL_SUFFIX, PREVIOUS_SUFFIX = ".partial", ".previous"


class Schedule(Protocol):
    """A part of a training's state besides weights and optimizer, such as the learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state that ``state_dict`` returned."""


@dataclass(frozen=True)
class EngineState:
    """The content of a checkpoint: a model, its optimizer and the learning-rate schedule."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule


@dataclass(frozen=True)
class CheckpointFormat:
    """A way to write checkpoints: two collective functions, which save into a folder and load from a folder."""

    save: Callable[[Path, EngineState], None]
    load: Callable[[Path, EngineState], None]


def save_file(path: Path, engine_state: EngineState) -> None:
    """Write the full state from rank 0 into one file, which replaces the previous checkpoint when it is complete.

    Raises CheckpointError on every rank if the file cannot be written.
    """
    comm = Comm()
    if (consolidate := getattr(engine_state.optimizer, "consolidate_state_dict", None)) is not None:
        consolidate(to=0)  # a ZeroRedundancyOptimizer keeps its state on all ranks
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
    """Read the file on every rank with ``weights_only``, and load it after all ranks have read and checked it.

    Raises CheckpointError on every rank if there is no checkpoint, or if it is damaged, contains code or belongs to
    another model.
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
    """Raise CheckpointError unless ``content`` fits this model and optimizer.

    This check is needed because torch's own loading copies the tensors that fit before it raises an error.
    """
    # Not the optimizer's state_dict(): a ZeroRedundancyOptimizer has no state_dict before it was consolidated.
    parts: tuple[tuple[str, Mapping[str, Any], Callable[[Mapping[str, Any]], object]], ...] = (
        ("model", engine_state.module.state_dict(), tensor_shapes),
        ("optimizer", {"param_groups": engine_state.optimizer.param_groups}, param_group_sizes),
        ("schedule", engine_state.schedule.state_dict(), sorted),
    )
    for part, expected, summarize in parts:
        got = content.get(part) if isinstance(content, Mapping) else None
        if not isinstance(got, Mapping) or summarize(got) != summarize(expected):
            raise CheckpointError(
                f"load from {file}: its {part} does not match this engine; expected a checkpoint that this engine saved"
            )


def tensor_shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of every entry of a model's state dict, or None for entries that have no shape."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def param_group_sizes(state: Mapping[str, Any]) -> list[int]:
    """Return the number of parameters in each group of an optimizer's state dict."""
    return [len(group["params"]) for group in state["param_groups"]]


def save_shards(path: Path, engine_state: EngineState, by_parameter: bool = False) -> None:
    """Write each rank's shards with ``write_state``.

    With ``by_parameter``, options of the optimizer are saved for each parameter, because each rank has other
    parameters.
    """
    write_state(path, sharded_state_dict(engine_state, by_parameter))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` with torch.distributed.checkpoint into a folder that is renamed when complete.

    Raises CheckpointError on every rank if it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    comm, partial = Comm(), path / (FOLDER_NAME + PARTIAL_SUFFIX)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
    try:
        save(state, checkpoint_id=partial)
    except CheckpointException as error:  # a BaseException, which a caller's `except Exception` would not catch
        raise CheckpointError(f"save to {path}: {error}") from error
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial`` to the checkpoint's folder, so that at every moment the old or the new checkpoint exists."""
    current, previous = path / FOLDER_NAME, path / (FOLDER_NAME + PREVIOUS_SUFFIX)
    if current.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(current, previous)
    os.replace(partial, current)
    shutil.rmtree(previous, ignore_errors=True)


def load_shards(path: Path, engine_state: EngineState, by_parameter: bool = False) -> None:
    """Read a checkpoint of ``save_shards`` at any world size, and load it after all ranks have read their part.

    Raises CheckpointError on every rank if the checkpoint is missing or damaged. The function uses torch's own reader,
    as users of FSDP2 do. That reader loads ``.metadata`` with plain pickle (pytorch/pytorch#189308), so load no
    checkpoint that you did not write.
    """
    from torch.distributed.checkpoint.state_dict import set_state_dict

    with raise_on_all_ranks(Comm()):
        # The second folder exists if a save was interrupted between its two renames.
        folders = (path / FOLDER_NAME, path / (FOLDER_NAME + PREVIOUS_SUFFIX))
        saved_folder = next((folder for folder in folders if folder.is_dir()), None)
        if saved_folder is None:
            raise missing_checkpoint_error(path, FOLDER_NAME)
    # Load into clones: a damaged file would leave the engine's own tensors partly overwritten.
    state = clone_tensors(sharded_state_dict(engine_state, by_parameter))
    read_state(saved_folder, state)
    set_state_dict(
        engine_state.module,
        engine_state.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=state_dict_options(by_parameter),
    )
    engine_state.schedule.load_state_dict(state["schedule"])


def read_state(folder: Path, state: dict[str, Any]) -> None:
    """Read the folder of a checkpoint into the tensors of ``state``.

    Raises CheckpointError on every rank if the checkpoint is damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise CheckpointError(
            f"load from {folder.parent}: damaged, or another engine's ({error}); "
            "expected a checkpoint that this engine saved"
        ) from error


def missing_checkpoint_error(path: Path, name: str) -> CheckpointError:
    """Return the error for a folder that contains no checkpoint."""
    return CheckpointError(
        f"load from {path}: it contains no {name}; expected a folder that an engine of this kind saved"
    )


def state_dict_options(by_parameter: bool) -> StateDictOptions:
    """Return torch's options, in which an optimizer's state dict is flat if it is saved ``by_parameter``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=by_parameter)


def sharded_state_dict(engine_state: EngineState, by_parameter: bool) -> dict[str, Any]:
    """Return the state that torch.distributed.checkpoint saves: shards by original parameter name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    options = state_dict_options(by_parameter)
    model, optimizer = get_state_dict(engine_state.module, engine_state.optimizer, options=options)
    return {"model": model, "optimizer": optimizer, "schedule": engine_state.schedule.state_dict()}


def clone_tensors(value: Any) -> Any:
    """Return a copy of ``value``, which is a tensor or nested containers of tensors, with cloned tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: clone_tensors(entry) for key, entry in value.items()}
    return [clone_tensors(entry) for entry in value] if isinstance(value, list) else value


SINGLE_FILE_FORMAT = CheckpointFormat(save_file, load_file)
SHARDED_FORMAT = CheckpointFormat(save_shards, load_shards)
STAGES_FORMAT = CheckpointFormat(
    functools.partial(save_shards, by_parameter=True), functools.partial(load_shards, by_parameter=True)
)
