"""Refuse the calls that an engine without a forward and a backward of its own does not have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

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
    """The calls of ``Engine`` that engines of the form ``CallForm.WHOLE_TRAINING`` have no answer to."""

    def step(self) -> NoReturn:
        self.refuse("step()")

    def grad_norm(self) -> float | None:
        """Return None: the norm of each step is in its ``TrainedStep``."""
        return None

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Return no entry: what ``train`` returns is whole on every rank."""
        return {}
