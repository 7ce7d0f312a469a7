"""Engines that raise, hang, die or break the protocol.

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
from zharness.mutants.wrapper import EngineWrapper


class Crashing(EngineWrapper):
    """Raises in its backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        raise IndexError("list index out of range")


class Hanging(EngineWrapper):
    """Never returns from its backward on rank 1."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if torch.distributed.get_rank() == 1:
            threading.Event().wait()
        self.base.backward(loss, retain_graph=retain_graph)


class Dying(EngineWrapper):
    """Dies of a segmentation fault in its backward on rank 1."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        self.base.backward(loss, retain_graph=retain_graph)


class WrongNames(EngineWrapper):
    """Reports gradients under names that the model does not have."""

    def full_grads(self) -> dict[str, Tensor]:
        return {f"module.{name}": grad for name, grad in self.base.full_grads().items()}


class ReturnsNothing(EngineWrapper):
    """Returns None instead of gradients."""

    def full_grads(self) -> dict[str, Tensor]:
        return None  # type: ignore[return-value]


class WrongShapes(EngineWrapper):
    """Reports flattened gradients."""

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad.flatten() for name, grad in self.base.full_grads().items()}


class ShardsLeft(EngineWrapper):
    """Leaves, on rank 0, the first weight a shard when it is closed."""

    def close(self) -> None:
        self.base.close()
        if torch.distributed.get_rank() == 0:
            first = next(self.module.parameters())
            first.data = first.detach().flatten()[:1].clone()


class ChangesWeights(EngineWrapper):
    """Initialises one weight anew on rank 1."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if torch.distributed.get_rank() == 1:
            nn.init.ones_(next(model.parameters()))


class ChangesWeightsInside(EngineWrapper):
    """Reports other weights than those of the model that it was built with."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: weight + 1 for name, weight in self.base.full_params().items()}


class Renames(EngineWrapper):
    """Adds a buffer to the model, which adds a name to its state dict."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        model.register_buffer("steps", torch.zeros(()))


class StopsTraining(EngineWrapper):
    """Leaves a module in eval mode."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        next(model.children()).eval()


class Freezes(EngineWrapper):
    """Freezes the first parameter."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        next(model.parameters()).requires_grad_(False)


class ChangesABuffer(EngineWrapper):
    """Adds the rank to every buffer, which changes it on all ranks but the first."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for buffer in model.buffers():
            buffer.add_(torch.distributed.get_rank())


class ConvertsABuffer(EngineWrapper):
    """Converts the model's buffers to float64."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.double())


class ChangesAFactor(EngineWrapper):
    """Adds 1 to every parameter with a single element."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            if parameter.numel() == 1:
                parameter.data.add_(1)


class LacksAMethod(EngineWrapper):
    """Has no ``save`` method."""

    save = None


class Modest(EngineWrapper):
    """Does not claim a second backward on a retained graph, which works."""

    @classmethod
    def claims(cls, base: Capabilities) -> Capabilities:
        return replace(base, stages=frozenset({0}), refuses={Feature.RETAIN_GRAPH: "who knows"})


class ReplacesLinear(EngineWrapper):
    """Replaces a function of torch for the whole process by one that computes the same."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        original = self.linear = nn.functional.linear
        nn.functional.linear = lambda *args: original(*args)

    def close(self) -> None:
        nn.functional.linear = self.linear
        self.base.close()


class NotAnEngine:
    """Has none of the methods of an engine."""


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
