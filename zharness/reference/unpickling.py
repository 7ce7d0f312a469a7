"""Reading files that somebody else may have written, without running what they carry.

A pickle names functions and calls them, so reading one with ``pickle.load`` runs whatever its author planted.
``torch.load(weights_only=True)`` calls nothing but what tensors and plain containers need, but
torch.distributed.checkpoint reads its ``.metadata`` with plain pickle: here that too goes by a list of allowed names.
"""

from __future__ import annotations

import io
import pickle
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from zharness.errors import CheckpointError
from zharness.reference.torch_private import safe_globals

_DCP = "torch.distributed.checkpoint"
# What torch 2.6 to 2.13 write into .metadata: records without behaviour, and the constants in them.
METADATA_NAMES = frozenset(
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
        allowed = (module, name) in METADATA_NAMES or (module == "torch" and _is_dtype(name))
        if not allowed:
            raise CheckpointError(f"the checkpoint's metadata asks for {module}.{name}, which none needs: refused")
        return super().find_class(module, name)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


class TensorReader(FileSystemReader):
    """torch.distributed.checkpoint's reader, for checkpoints that hold tensors alone, in files of ``files``."""

    def __init__(self, path: Path, files: frozenset[str]) -> None:
        super().__init__(path)
        self._files = files

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
        stray = {info.relative_path for info in metadata.storage_data.values()} - self._files
        if stray:
            raise CheckpointError(f"{self.path} points to files that are not its own: {sorted(stray)}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class LossScaler:
    """Stands in for deepspeed.runtime.fp16.loss_scaler.LossScaler: its attributes, none of its behaviour."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"  # by which a file names it, and torch knows what is allowed
    cur_scale: float


class ZeroStageEnum(IntEnum):
    """Stands in for deepspeed.runtime.zero.config.ZeroStageEnum."""

    __module__ = "deepspeed.runtime.zero.config"

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def load(file: Path | io.BytesIO, what: str) -> Any:
    """``torch.load`` of tensors and plain containers, on CPU. Raises CheckpointError about ``what`` for all else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message recommends weights_only=False; the name in it is what was refused.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {refused[1]}" if refused else "it is damaged"
        allowed = "tensors, numbers, strings, and lists, tuples, sets and dicts of them"
        raise CheckpointError(f"{what} is refused: {reason}; expected {allowed}") from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{what} is damaged: {str(error).partition('.')[0]}") from None


def load_deepspeed(file: Path) -> Any:
    """``load`` of a file of DeepSpeed's own: two of its classes become the stand-ins above."""
    with safe_globals((LossScaler, ZeroStageEnum)):
        return load(file, str(file))
