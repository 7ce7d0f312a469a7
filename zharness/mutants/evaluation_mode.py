"""Mutants that are wrong after an exception in no_sync, in evaluation mode, or about the random state after close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import AccumulationOwner, EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.SCALE,
    Target("window.evaluation_mode", Part.OPTIMIZER, model="experts", variant="2_by_engine"),
    origin=Origin.BLIND_11,
)
class DoesNotDivideInEvaluationMode(EngineWrapper):
    """In an engine's window, does not divide a loss if its forward ran in evaluation mode."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.factor = config.accumulation_steps if config.accumulation_owner is AccumulationOwner.ENGINE else 1
        self.evaluates = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.evaluates = not self.module.training
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * self.factor if self.evaluates else loss, retain_graph=retain_graph)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("training.no_sync", None, cause="no_sync"),
    origin=Origin.BLIND_11,
)
class StaysInNoSync(EngineWrapper):
    """Stays inside ``no_sync`` after an exception in its block, so that the next ``step`` raises."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        manager = self.manager = self.base.no_sync()  # kept alive, because its deallocation would leave no_sync
        manager.__enter__()
        yield  # an exception skips the exit below
        manager.__exit__(None, None, None)


@mutant(
    FaultKind.RESOURCES,
    Target("training.caller_modes", Part.FORWARD, parameter="random state after close"),
    origin=Origin.BLIND_11,
)
class CloseRestoresTheGenerator(EngineWrapper):
    """Sets torch's generator in ``close`` to the state that the generator had when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.state = torch.get_rng_state()
        super().__init__(model, config)

    def close(self) -> None:
        self.base.close()
        torch.set_rng_state(self.state)
