"""Write and read a checkpoint's tensors with torch.distributed.checkpoint, without running code from a file.

Import this module only when a checkpoint is saved or loaded: torch.distributed.checkpoint and DTensor take more than a
second to import. torch reads the file ``.metadata`` with plain pickle, which calls the functions that the file names,
so this module allows only the names in ``ALLOWED_METADATA_NAMES``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from enum import Enum
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

_DCP = "torch.distributed.checkpoint"
# The names that torch 2.6 to 2.13 write into .metadata: data classes without behaviour, and their constants.
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
    """An unpickler that loads only the names in ALLOWED_METADATA_NAMES and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class ``module.name`` if it is allowed.

        Raises CheckpointError for any other name, without importing its module.
        """
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 pickles members of an enum like this
            return _get_enum_member
        allowed = (module, name) in ALLOWED_METADATA_NAMES or (module == "torch" and _is_dtype(name))
        if not allowed:
            raise CheckpointError(
                f"the checkpoint's metadata names {module}.{name}, which no checkpoint needs; the load is refused"
            )
        return super().find_class(module, name)


def _get_enum_member(kind: Any, name: str) -> Enum:
    """Return the member ``name`` of the enum ``kind``. Raises CheckpointError if there is none."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(f"the checkpoint's metadata reads {name!r} of {kind!r}; the load is refused")
    return kind[name]


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


class TensorReader(FileSystemReader):
    """A torch.distributed.checkpoint reader that reads only tensors, and only from files in ``allowed_files``."""

    def __init__(self, path: Path, allowed_files: frozenset[str]) -> None:
        super().__init__(path)
        self._allowed_files = allowed_files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the file ``.metadata``.

        Raises CheckpointError if the file contains code, has an entry that is not a tensor, or refers to a file that is
        not allowed.
        """
        raw = (Path(self.path) / ".metadata").read_bytes()
        metadata = MetadataUnpickler(io.BytesIO(raw)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.path}/.metadata does not describe a checkpoint")
        for key, entry in metadata.state_dict_metadata.items():
            # torch's planner reads other entries with weights_only=False, which runs code.
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self.path} contains {key!r}, which is not a tensor; expected tensors only")
        stray = {info.relative_path for info in metadata.storage_data.values()} - self._allowed_files
        if stray:
            raise CheckpointError(f"{self.path} refers to files outside the checkpoint: {sorted(stray)}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this rank's tensors to this rank's files in ``folder``. This is a collective.

    Raises CheckpointError on every rank if the write fails on any rank.
    """
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise _make_checkpoint_error("written", folder, error) from None


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, allowed_files: frozenset[str]) -> None:
    """Fill ``tensors`` in place with the saved tensors of the same names in ``folder``. This is a collective.

    Only the files in ``allowed_files`` are read. Raises CheckpointError on every rank if the read fails on any rank.
    """
    try:
        load(dict(tensors), storage_reader=TensorReader(folder, allowed_files))
    except CheckpointException as error:
        raise _make_checkpoint_error("read", folder, error) from None


def _make_checkpoint_error(verb: str, path: Path, error: CheckpointException) -> CheckpointError:
    """Return a CheckpointError that lists why each rank could not write or read the checkpoint.

    ``verb`` is "written" or "read".
    """
    causes = "; ".join(f"{type(e).__name__}: {e} (rank {rank})" for rank, (e, _) in error.failures.items())
    return CheckpointError(f"{path} could not be {verb}: {causes}")
