"""Save and load checkpoints of FSDP1. A checkpoint is one file with full state dicts, which rank 0 writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zharness.comm import Comm
from zharness.engines.torch_checkpoint import (
    FILE_NAME,
    PARTIAL_SUFFIX,
    CheckpointFormat,
    EngineState,
    missing_checkpoint_error,
    param_group_sizes,
    tensor_shapes,
)
from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True)
class FullStates:
    """Access to the full state dicts of a wrapped model and its optimizer through ``FSDP.state_dict_type``.

    ``offload`` says whether FSDP moves the optimizer's state to the CPU (its option ``offload_to_cpu``).
    """

    wrapped: FullyShardedDataParallel
    offload: bool

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Make FSDP return and accept full state dicts on every rank while the ``with`` block runs."""
        from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

        with type(self.wrapped).state_dict_type(
            self.wrapped,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(offload_to_cpu=self.offload),
        ):
            yield

    def optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state dict under original parameter names. This is a collective."""
        with self.selected():
            return type(self.wrapped).optim_state_dict(self.wrapped, optimizer)

    def model(self) -> dict[str, Any]:
        """Return the model's full state dict under original names. This is a collective."""
        with self.selected():
            return self.wrapped.state_dict()

    def load(self, model: dict[str, Any], state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load the full state dicts of the model and the optimizer. This is a collective."""
        with self.selected():
            self.wrapped.load_state_dict(model)
            own_part = type(self.wrapped).optim_state_dict_to_load(self.wrapped, optimizer, state)
        optimizer.load_state_dict(own_part)


def full_state_format(states: FullStates) -> CheckpointFormat:
    """Return the checkpoint format of FSDP1, which saves and loads ``states``."""
    return CheckpointFormat(partial(save_full_state, states), partial(load_full_state, states))


def save_full_state(states: FullStates, path: Path, engine_state: EngineState) -> None:
    """Write the full state into one file on rank 0. The file replaces the previous checkpoint when it is complete.

    Raises CheckpointError on every rank if the file cannot be written.
    """
    comm = Comm()
    content = {
        "model": states.model(),
        "optimizer": states.optimizer(engine_state.optimizer),
        "schedule": engine_state.schedule.state_dict(),
    }
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            torch.save(content, path / (FILE_NAME + PARTIAL_SUFFIX))
            os.replace(path / (FILE_NAME + PARTIAL_SUFFIX), path / FILE_NAME)


def load_full_state(states: FullStates, path: Path, engine_state: EngineState) -> None:
    """Read the file on every rank with ``weights_only``, and load it after all ranks have read and checked it.

    Raises CheckpointError on every rank if there is no checkpoint, or if it is damaged, contains code or belongs to
    another model.
    """
    shapes = tensor_shapes(states.model())
    file = path / FILE_NAME
    with raise_on_all_ranks(Comm()):
        if not file.is_file():
            raise missing_checkpoint_error(path, FILE_NAME)
        content = unpickling.load_safely(file, str(file))
        require_matching_content(content, shapes, engine_state, file)
    states.load(content["model"], content["optimizer"], engine_state.optimizer)
    engine_state.schedule.load_state_dict(content["schedule"])


def require_matching_content(content: Any, shapes: dict[str, Any], engine_state: EngineState, file: Path) -> None:
    """Raise CheckpointError unless ``content`` fits the optimizer and a model whose tensors have ``shapes``."""
    try:
        matches = (
            tensor_shapes(content["model"]) == shapes
            and param_group_sizes(content["optimizer"]) == param_group_sizes(vars(engine_state.optimizer))
            and content["schedule"].keys() == engine_state.schedule.state_dict().keys()
        )
    except (AttributeError, KeyError, TypeError):  # the file contains other data
        matches = False
    if not matches:
        raise CheckpointError(
            f"load from {file}: its content does not match this engine; expected a checkpoint that this engine saved"
        )
