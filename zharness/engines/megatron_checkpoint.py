"""Find out what a checkpoint of Megatron-FSDP, written with torch.distributed.checkpoint, contains."""

from __future__ import annotations

from pathlib import Path

from zharness.comm import Comm
from zharness.engines.torch_checkpoint import FOLDER_NAME, missing_checkpoint_error
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks


def has_optimizer_state(path: Path) -> bool:
    """Return whether the checkpoint was saved after a step, so that it has state of the optimizer.

    Raises CheckpointError on every rank if the checkpoint is missing, or if its list of tensors is damaged.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with raise_on_all_ranks(Comm()):
        if not (path / FOLDER_NAME).is_dir():
            raise missing_checkpoint_error(path, FOLDER_NAME)
        names = FileSystemReader(path / FOLDER_NAME).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.state.") for name in names)
