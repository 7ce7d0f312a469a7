"""Save and load checkpoints of Megatron-FSDP with torch.distributed.checkpoint, as its documentation does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from zharness.comm import Comm
from zharness.engines.torch_checkpoint import FOLDER_NAME, PARTIAL_SUFFIX, missing_checkpoint_error, publish
from zharness.errors import CheckpointError
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` with torch.distributed.checkpoint into a folder that is renamed when complete.

    Raises CheckpointError on every rank if it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    comm, partial_folder = Comm(), path / (FOLDER_NAME + PARTIAL_SUFFIX)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial_folder, ignore_errors=True)
    try:
        save(state, checkpoint_id=partial_folder)
    except CheckpointException as error:
        raise CheckpointError(f"save to {path}: {error}") from error
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            publish(partial_folder, path)


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Read a checkpoint of ``save_state`` into the tensors of ``state``.

    Raises CheckpointError on every rank if the checkpoint is damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, checkpoint_id=path / FOLDER_NAME)
    except CheckpointException as error:
        raise CheckpointError(f"load from {path}: damaged, or another engine's ({error})") from error


def has_optimizer_state(path: Path) -> bool:
    """Return whether the checkpoint was saved after a step, so that it has state of the optimizer.

    Raises CheckpointError on every rank if it is missing, or if its list of tensors is damaged.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with raise_on_all_ranks(Comm()):
        if not (path / FOLDER_NAME).is_dir():
            raise missing_checkpoint_error(path, FOLDER_NAME)
        names = FileSystemReader(path / FOLDER_NAME).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.state.") for name in names)
