"""Engines broken on purpose in what they do with backwards, transforms, checkpoints and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from suites.meta.broken import Around, Factory
from zharness.engines import EngineConfig

Hook = Callable[[Tensor], Tensor]


def in_backward() -> int:
    """The number of the backward that is running; -1 outside one."""
    return torch._C._current_graph_task_id()


class HookedParameters(Around):
    """Changes every parameter's local gradient, whichever backward makes it."""

    def __init__(self, model: nn.Module, config: EngineConfig, name: str = "reference") -> None:
        super().__init__(model, config, name)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.changed)

    def changed(self, grad: Tensor) -> Tensor:
        return 2 * grad


class OnlyTheFirstBackwardCounts(HookedParameters):
    """Counts what the first backward of a step makes, and not what a later one, or one within it, does (#7780)."""

    first = -1

    def changed(self, grad: Tensor) -> Tensor:
        self.first = in_backward() if self.first == -1 else self.first
        return grad if in_backward() == self.first else torch.zeros_like(grad)

    def zero_grad(self) -> None:
        self.first = -1
        self.right.zero_grad()


class HookedOutputs(Around):
    """Changes the gradient of every tensor that it returns as its only output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.changed)
        return output

    def changed(self, grad: Tensor) -> Tensor:
        return 2 * grad


class DividesEveryBackward(HookedOutputs):
    """Divides by the accumulation steps in any backward from its output (#8026 without a guard for autograd.grad)."""

    def changed(self, grad: Tensor) -> Tensor:
        return grad / self.config.accumulation_steps


class Once(torch.autograd.Function):
    """The identity, whose backward forgets its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.detach()


class FirstOrderOnly(Around):
    """Right once; nothing flows through a gradient a second time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Once.apply(self.right(*args, **kwargs))


class WeightsExchangedUnseen(Around):
    """Steps behind autograd's back: a graph that saved the old weights goes on with them."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "plain")

    def step(self) -> None:
        grads = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        self.right.zero_grad()
        for parameter, grad in grads:
            parameter.data = parameter.data.clone()
            parameter.grad = grad


class DrawsWhileRecomputing(Around):
    """Draws a random number before each forward that runs within a backward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            module.register_forward_pre_hook(self.draw)

    def draw(self, *_: Any) -> None:
        if in_backward() != -1:
            torch.rand(1)


class FlippedParameters(Around):
    """Reports its parameters with the wrong sign."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: -parameter for name, parameter in self.right.full_params().items()}


class ZerosForUnused(Around):
    """Reports a gradient of zero for every parameter that nobody used."""

    def full_grads(self) -> dict[str, Tensor]:
        zeros = {name: torch.zeros_like(p) for name, p in self.right.full_params().items()}
        return {**zeros, **self.right.full_grads()}


class FrozenForGood(Around):
    """Never gives a gradient to what was frozen when it was made."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self.right.full_grads().items() if name not in self.frozen}


class LocalEdits(Around):
    """Leaves what a rank edits on that rank."""

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        weights = dict(self.module.named_parameters())
        return nullcontext({name: weights[name].detach() for name in names})


class DecaysTheUnused(Around):
    """Its optimizer decays what has no gradient too."""

    def step(self) -> None:
        used = self.right.full_grads()
        self.right.step()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name not in used:
                    parameter.mul_(0.999)


class DrawsTwice(Around):
    """Draws its initial weights after having drawn something else."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.rand(1)
        super().__init__(model, config)


doubles_every_gradient: Factory = HookedParameters
only_the_first_backward_counts: Factory = OnlyTheFirstBackwardCounts
doubles_what_comes_to_its_output: Factory = HookedOutputs
divides_every_backward: Factory = DividesEveryBackward
first_order_only: Factory = FirstOrderOnly
weights_exchanged_unseen: Factory = WeightsExchangedUnseen
draws_while_recomputing: Factory = DrawsWhileRecomputing
flipped_parameters: Factory = FlippedParameters
zeros_for_unused: Factory = ZerosForUnused
frozen_for_good: Factory = FrozenForGood
edits_stay_where_they_are_made: Factory = LocalEdits
decays_the_unused: Factory = DecaysTheUnused
draws_twice_at_construction: Factory = DrawsTwice
