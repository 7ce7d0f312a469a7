"""Engines whose fault is no wrong number: they raise, hang, die or break the protocol.

Engines that compute something wrong are in ``zharness.mutants``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import Capabilities, Engine, EngineConfig, Feature
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


class WrongShapes(Around):
    """Reports gradients flat."""

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad.flatten() for name, grad in self.right.full_grads().items()}


class ShardsLeft(Around):
    """Rank 0's first weight is still a shard when the engine is closed; the others' are whole again."""

    def close(self) -> None:
        self.right.close()
        if torch.distributed.get_rank() == 0:
            first = next(self.module.parameters())
            first.data = first.detach().flatten()[:1].clone()


class ChangesWeights(Around):
    """Initialises one weight anew, where there is more than one rank."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if torch.distributed.get_rank() == 1:
            nn.init.ones_(next(model.parameters()))


class ChangesWeightsInside(Around):
    """Trains other weights than it was given; the model itself keeps its own."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: weight + 1 for name, weight in self.right.full_params().items()}


class Renames(Around):
    """Adds a buffer to the model."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        model.register_buffer("steps", torch.zeros(()))


class StopsTraining(Around):
    """Leaves a module in eval mode."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        next(model.children()).eval()


class Freezes(Around):
    """Trains less than it was asked to."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        next(model.parameters()).requires_grad_(False)


class ChangesABuffer(Around):
    """Writes into a buffer, where there is more than one rank."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for buffer in model.buffers():
            buffer.add_(torch.distributed.get_rank())


class ConvertsABuffer(Around):
    """Keeps buffers in another dtype than it was given."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.double())


class ChangesAFactor(Around):
    """Changes the weight that has a single element, on the rank that owns it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            if parameter.numel() == 1:
                parameter.data.add_(1)


class LacksAMethod(Around):
    """Has no way to save."""

    save = None


class Modest(Around):
    """Does not claim what it can."""

    @classmethod
    def claims(cls, right: Capabilities) -> Capabilities:
        return replace(right, stages=frozenset({0}), refuses={Feature.RETAIN_GRAPH: "who knows"})


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
wrong_shapes: Factory = WrongShapes
changes_weights: Factory = ChangesWeights
changes_weights_inside: Factory = ChangesWeightsInside
renames: Factory = Renames
stops_training: Factory = StopsTraining
freezes: Factory = Freezes
changes_a_buffer: Factory = ChangesABuffer
converts_a_buffer: Factory = ConvertsABuffer
changes_a_factor: Factory = ChangesAFactor
lacks_a_method: Factory = LacksAMethod
modest: Factory = Modest
replaces_linear: Factory = ReplacesLinear
leaves_a_shard: Factory = ShardsLeft


def returns_no_engine(model: nn.Module, config: EngineConfig) -> NotAnEngine:
    return NotAnEngine()


def raises_at_once(model: nn.Module, config: EngineConfig) -> Engine:
    raise OSError("no licence file")
