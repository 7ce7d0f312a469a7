"""Define the wrapper around a correct engine that every mutant subclasses, and further base classes of mutants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zharness import engines
from zharness.engines import AccumulationOwner, Capabilities, EngineConfig
from zharness.mutants import seams_engines


class Around:
    """An engine that passes every call on to a correct engine.

    Subclasses break one call, or a part of the correct engine. ``over`` is the name of the correct engine. ``stages``
    are the stages at which the subclass is broken.
    """

    over: ClassVar[str] = "reference"
    stages: ClassVar[tuple[int, ...]] = (0,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.config = config
        # The type is Any, because mutants use attributes that are not in the protocol.
        self.right: Any = engines.get(self.over)(model, config)
        self.module: nn.Module = self.right.module
        self.capabilities = self.claims(self.right.capabilities)

    @classmethod
    def claims(cls, right: Capabilities) -> Capabilities:
        """Return the correct engine's capabilities, restricted to the stages at which the mutant is broken."""
        return replace(right, stages=frozenset(cls.stages))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        self.right.step()

    def __getattr__(self, name: str) -> Any:
        if name == "right":  # read while __init__ runs; the line below would recurse
            raise AttributeError(name)
        return getattr(self.right, name)

    def trained(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters that currently have a gradient."""
        return (parameter for parameter in self.module.parameters() if parameter.grad is not None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the correct engine."""
        found: torch.optim.Optimizer = seams_engines.optimizer(self.right)
        return found


class OverDDP(Around):
    """The base class of mutants around DDP, whose optimizer is torch's own over full parameters."""

    over = "ddp"


class OverFSDP2(Around):
    """The base class of mutants around FSDP2, whose optimizer is torch's own over sharded parameters."""

    over = "fsdp2"
    stages: ClassVar[tuple[int, ...]] = (3,)


class HookedParameters(Around):
    """The base class of mutants that change the local gradient of every parameter in every backward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.changed)  # type: ignore[no-untyped-call]

    def changed(self, grad: Tensor) -> Tensor:
        """Return the gradient that replaces ``grad``."""
        return 2 * grad


class CountsMicroBatches(Around):
    """The base class of mutants that are wrong inside an engine's window, of ``window`` micro-batches.

    ``micro`` is the number of micro-batches of the window that were stepped. Where the caller owns the accumulation,
    each micro-batch is a window.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        owns = config.accumulation_owner is AccumulationOwner.ENGINE
        self.window, self.micro = (config.accumulation_steps if owns else 1), 0

    def count_step(self) -> None:
        """Count a call of ``step``; ``micro`` is 0 again at the end of a window."""
        self.micro = (self.micro + 1) % self.window


class SpoiledLoad(Around):
    """The base class of mutants that load a checkpoint correctly and then damage what was loaded."""

    def load(self, path: Path) -> None:
        self.right.load(path)
        self.spoil()

    def load_universal(self, path: Path) -> None:
        self.right.load_universal(path)
        self.spoil()

    def spoil(self) -> None:
        """Change the loaded weights or optimizer state; subclasses override this method."""


in_backward = seams_engines.in_backward


class ClosesOverOthers(Around):
    """A base class of mutants that change every other engine of the process in ``close``.

    ``alive`` are the engines that are not closed; each subclass has a list of its own.
    """

    alive: ClassVar[list[Around]]

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.alive.append(self)

    def close(self) -> None:
        self.alive[:] = [engine for engine in self.alive if engine is not self]
        for engine in self.alive:
            self.change_other(engine)
        self.right.close()

    def change_other(self, engine: Around) -> None:
        """Change another engine that is not closed; subclasses override this method."""
