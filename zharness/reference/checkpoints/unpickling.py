"""Reading files that somebody else may have written, without running what they carry.

A pickle names functions and calls them, so reading one with ``pickle.load`` runs whatever its author planted.
``torch.load(weights_only=True)`` calls nothing but what tensors and plain containers need. ``pieces`` does the same for
what torch.distributed.checkpoint reads with plain pickle.
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


def load_safely(file: Path | io.BytesIO, description: str) -> Any:
    """``torch.load`` of tensors and plain containers, on CPU. Raises CheckpointError about ``what`` for all else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message recommends weights_only=False; the name in it is what was refused.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {refused[1]}" if refused else "it is damaged"
        allowed = "tensors, numbers, strings, and lists, tuples, sets and dicts of them"
        raise CheckpointError(f"{description} is refused: {reason}; expected {allowed}") from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{description} is damaged: {str(error).partition('.')[0]}") from None


def load_deepspeed_file(file: Path) -> Any:
    """``load`` of a file of DeepSpeed's own: two of its classes become the stand-ins above."""
    with safe_globals((LossScaler, ZeroStageEnum)):
        return load_safely(file, str(file))
