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


class EngineWrapper:
    """An engine that passes every call on to a correct engine.

    Subclasses break one call, or a part of the correct engine. ``wraps`` is the name of the correct engine. ``stages``
    are the stages at which the subclass is broken.
    """

    wraps: ClassVar[str] = "reference"
    stages: ClassVar[tuple[int, ...]] = (0,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.config = config
        # The type is Any, because mutants use attributes that are not in the protocol.
        self.base: Any = engines.get(self.wraps)(model, config)
        self.module: nn.Module = self.base.module
        self.capabilities = self.claims(self.base.capabilities)

    @classmethod
    def claims(cls, base: Capabilities) -> Capabilities:
        """Return the correct engine's capabilities, restricted to the stages at which the mutant is broken."""
        return replace(base, stages=frozenset(cls.stages))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        self.base.step()

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # read while __init__ runs; the line below would recurse
            raise AttributeError(name)
        return getattr(self.base, name)

    def parameters_with_grad(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters that currently have a gradient."""
        return (parameter for parameter in self.module.parameters() if parameter.grad is not None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the correct engine."""
        found: torch.optim.Optimizer = seams_engines.optimizer(self.base)
        return found


class DDPWrapper(EngineWrapper):
    """The base class of mutants around DDP, whose optimizer is torch's own over full parameters."""

    wraps = "ddp"


class FSDP2Wrapper(EngineWrapper):
    """The base class of mutants around FSDP2, whose optimizer is torch's own over sharded parameters."""

    wraps = "fsdp2"
    stages: ClassVar[tuple[int, ...]] = (3,)


class HookedParameters(EngineWrapper):
    """The base class of mutants that change the local gradient of every parameter in every backward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.changed)  # type: ignore[no-untyped-call]

    def changed(self, grad: Tensor) -> Tensor:
        """Return the gradient that replaces ``grad``."""
        return 2 * grad


class CountsMicroBatches(EngineWrapper):
    """The base class of mutants that are wrong inside an engine's accumulation window of ``window`` micro-batches.

    ``micro`` is the number of calls of ``step`` in the window so far. If the caller owns the accumulation, each
    micro-batch is a window of its own.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        owns = config.accumulation_owner is AccumulationOwner.ENGINE
        self.window, self.micro = (config.accumulation_steps if owns else 1), 0

    def count_step(self) -> None:
        """Count a call of ``step``; ``micro`` is 0 again at the end of a window."""
        self.micro = (self.micro + 1) % self.window


class SpoiledLoad(EngineWrapper):
    """The base class of mutants that load a checkpoint correctly and then damage what was loaded."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.spoil()

    def load_universal(self, path: Path) -> None:
        self.base.load_universal(path)
        self.spoil()

    def spoil(self) -> None:
        """Change the loaded weights or optimizer state; subclasses override this method."""


in_backward = seams_engines.in_backward


class ClosesOverOthers(EngineWrapper):
    """A base class of mutants that change every other engine of the process in ``close``.

    ``alive`` are the engines that are not closed; each subclass has a list of its own.
    """

    alive: ClassVar[list[EngineWrapper]]

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.alive.append(self)

    def close(self) -> None:
        self.alive[:] = [engine for engine in self.alive if engine is not self]
        for engine in self.alive:
            self.change_other(engine)
        self.base.close()

    def change_other(self, engine: EngineWrapper) -> None:
        """Change another engine that is not closed; subclasses override this method."""
