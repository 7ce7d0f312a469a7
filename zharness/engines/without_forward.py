"""Refuse the calls that an engine does not have if its callers cannot call forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import Capabilities, Piece
from zharness.errors import UsageError


class WithoutForward:
    """The calls of ``Engine`` that engines of other forms than ``CallForm.FORWARD_AND_BACKWARD`` refuse."""

    capabilities: Capabilities

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse("a forward")

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> NoReturn:
        self.refuse("a backward")

    def scale(self, loss: Tensor) -> NoReturn:
        self.refuse("scale(loss)")

    def no_sync(self) -> AbstractContextManager[Any]:
        self.refuse("no_sync()")

    def save(self, path: Path) -> None:
        self.refuse("save()")

    def load(self, path: Path) -> None:
        self.refuse("load()")

    def refuse(self, call: str) -> NoReturn:
        """Raise UsageError, because the engine has no such call."""
        raise UsageError(f"got {call}; this engine has {self.capabilities.form.value}")


class WholeTraining(WithoutForward):
    """The calls of ``Engine`` to which engines of the form ``CallForm.WHOLE_TRAINING`` have no answer."""

    def step(self) -> NoReturn:
        self.refuse("step()")

    def grad_norm(self) -> float | None:
        """Return None, because the norm of each step is in its ``TrainedStep``."""
        return None

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Return no entry, because the tensors that ``train`` returns are whole on every rank."""
        return {}


def join_state_dicts(model: nn.Module, own: Mapping[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Return the state dict of ``model``, joined from the tensors ``own`` of the stages of each rank of a pipeline.

    ``group`` has the ranks of the pipeline. In ``own``, a tensor with several names has the first of these names; in
    the result it is one tensor under all its names.
    """
    views: list[Mapping[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(views, dict(own), group=group)
    entries = {name: tensor for view in reversed(views) for name, tensor in view.items()} | dict(own)
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: entries[first] for name, first in names.items() if first in entries}
