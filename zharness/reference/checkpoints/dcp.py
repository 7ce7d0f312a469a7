"""A checkpoint's tensors, written and read by torch.distributed.checkpoint, without running what a file carries.

Imported only where a checkpoint is at hand: torch.distributed.checkpoint and torch's DTensor take more than a second,
which every command and every rank would spend that saves nothing.

It reads its ``.metadata`` with plain pickle, which calls the functions that a file names; here that goes by a list of
allowed names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zharness.errors import CheckpointError

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # public since torch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard  # type: ignore[attr-defined]

__all__ = ["DTensor", "Replicate", "Shard"]  # beside what is defined here
_DCP = "torch.distributed.checkpoint"
# What torch 2.6 to 2.13 write into .metadata: records without behaviour, and the constants in them.
ALLOWED_METADATA_NAMES = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13 moved them
        ("pathlib._local", "WindowsPath"),
    }
)


class MetadataUnpickler(pickle.Unpickler):
    """Finds the names in METADATA_NAMES and torch's dtypes, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises CheckpointError for a name that is not on the list; it is not even imported."""
        allowed = (module, name) in ALLOWED_METADATA_NAMES or (module == "torch" and _is_dtype(name))
        if not allowed:
            raise CheckpointError(f"the checkpoint's metadata asks for {module}.{name}, which none needs: refused")
        return super().find_class(module, name)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


class TensorReader(FileSystemReader):
    """torch.distributed.checkpoint's reader, for checkpoints that hold tensors alone, in files of ``files``."""

    def __init__(self, path: Path, allowed_files: frozenset[str]) -> None:
        super().__init__(path)
        self._allowed_files = allowed_files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for metadata that carry code, or lead to another file or to another unpickler."""
        raw = (Path(self.path) / ".metadata").read_bytes()
        metadata = MetadataUnpickler(io.BytesIO(raw)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.path}/.metadata does not describe a checkpoint")
        for key, entry in metadata.state_dict_metadata.items():
            # Anything but a tensor is read by torch's planner with weights_only=False.
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self.path} holds {key!r}, which is not a tensor: refused")
        stray = {info.relative_path for info in metadata.storage_data.values()} - self._allowed_files
        if stray:
            raise CheckpointError(f"{self.path} points to files that are not its own: {sorted(stray)}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Each rank's tensors into files of its own in ``folder``. Collective; raises CheckpointError on every rank."""
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise _make_checkpoint_error("written", folder, error) from None


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, allowed_files: frozenset[str]) -> None:
    """The tensors of those names, in place, from those of ``files`` in ``folder`` that hold them.

    Collective; raises CheckpointError on every rank.
    """
    try:
        load(dict(tensors), storage_reader=TensorReader(folder, allowed_files))
    except CheckpointException as error:
        raise _make_checkpoint_error("read", folder, error) from None


def _make_checkpoint_error(verb: str, path: Path, error: CheckpointException) -> CheckpointError:
    causes = "; ".join(f"{type(e).__name__}: {e} (rank {rank})" for rank, (e, _) in error.failures.items())
    return CheckpointError(f"{path} could not be {verb}: {causes}")
