"""Engines whose fault is no wrong number: they raise, hang, die or break the protocol.

Engines that compute something wrong are in ``zharness.mutants``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import Engine, EngineConfig
from zharness.mutants.around import Around


class Crashing(Around):
    """Raises in its backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        raise IndexError("list index out of range")


class Hanging(Around):
    """Rank 1 never comes back from its backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if torch.distributed.get_rank() == 1:
            threading.Event().wait()
        self.right.backward(loss, retain_graph=retain_graph)


class Dying(Around):
    """Rank 1 dies of a segmentation fault in its backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        self.right.backward(loss, retain_graph=retain_graph)


class WrongNames(Around):
    """Reports gradients under names that the model does not have."""

    def full_grads(self) -> dict[str, Tensor]:
        return {f"module.{name}": grad for name, grad in self.right.full_grads().items()}


class ReturnsNothing(Around):
    """Returns None where gradients are asked for."""

    def full_grads(self) -> dict[str, Tensor]:
        return None  # type: ignore[return-value]


class ReplacesLinear(Around):
    """Exchanges a function of torch for its whole process, for one that computes the same."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        right = self.linear = nn.functional.linear
        nn.functional.linear = lambda *args: right(*args)

    def close(self) -> None:
        nn.functional.linear = self.linear
        self.right.close()


class NotAnEngine:
    """Has none of the verbs."""


Factory = Callable[[nn.Module, EngineConfig], Any]

returns_nothing: Factory = ReturnsNothing
raises_in_backward: Factory = Crashing
hangs_in_backward: Factory = Hanging
dies_in_backward: Factory = Dying
wrong_names: Factory = WrongNames
replaces_linear: Factory = ReplacesLinear


def returns_no_engine(model: nn.Module, config: EngineConfig) -> NotAnEngine:
    return NotAnEngine()


def raises_at_once(model: nn.Module, config: EngineConfig) -> Engine:
    raise OSError("no licence file")
