"""Load files from untrusted sources without running code that they contain.

``pickle.load`` calls the functions that a file names, so it runs whatever code the author of the file put there.
``torch.load(weights_only=True)`` calls only what tensors and plain containers need. torch.distributed.checkpoint reads
one file with plain pickle; the module ``dcp`` restricts this read in the same way.
"""

from __future__ import annotations

import io
import pickle
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from zharness.errors import CheckpointError
from zharness.torch_private import safe_globals


class LossScaler:
    """A class without methods that is loaded in place of deepspeed.runtime.fp16.loss_scaler.LossScaler."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"  # files and torch's list of safe globals name the class by it
    cur_scale: float


class ZeroStageEnum(IntEnum):
    """A class that is loaded in place of deepspeed.runtime.zero.config.ZeroStageEnum."""

    __module__ = "deepspeed.runtime.zero.config"

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def load_safely(file: Path | io.BytesIO, description: str) -> Any:
    """Load a file of tensors and plain containers to the CPU.

    Raises CheckpointError for any other content and for a damaged file. The message of the error begins with
    ``description``.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Show only the refused name from torch's message, because the message recommends weights_only=False.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it contains {refused[1]}" if refused else "it is damaged"
        allowed = "tensors, numbers, strings, and lists, tuples, sets and dicts of them"
        raise CheckpointError(f"{description} is refused: {reason}; expected {allowed}") from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{description} is damaged: {str(error).partition('.')[0]}") from None


def load_deepspeed_file(file: Path) -> Any:
    """Load a file that DeepSpeed wrote, replacing two of its classes by LossScaler and ZeroStageEnum of this module."""
    with safe_globals((LossScaler, ZeroStageEnum)):
        return load_safely(file, str(file))
