"""Engines broken on purpose in what they hold, send and leave behind, and in training told by varying one thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from suites.meta.broken import Around, Factory
from zharness.engines import EngineConfig, Reduction

LEFT_BEHIND: list[Tensor] = []


class HoldsTheStateTwice(Around):
    """A second copy of every moment of the optimizer."""

    def step(self) -> None:
        self.right.step()
        for state in self.right.engine.optimizer.state.values():  # type: ignore[attr-defined]
            state["spare"] = state["exp_avg"].clone()


class SendsTwice(Around):
    """Reduces one more full set of parameters in each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        for parameter in self.module.parameters():
            self.right.engine.comm.all_reduce(torch.zeros_like(parameter))  # type: ignore[attr-defined]


class StaysGathered(Around):
    """Keeps a gathered copy of one parameter."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept = next(iter(model.parameters())).detach().clone()
        self.right.engine._ledger.add(self.kept)  # type: ignore[attr-defined]


class LeavesTensorsBehind(Around):
    """Keeps the last loss of every engine that ever was."""

    def close(self) -> None:
        LEFT_BEHIND.append(torch.zeros(()))
        self.right.close()


class ReadsFreshMemory(Around):
    """Adds memory that nobody wrote, times zero, to every gradient."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        for parameter in self.params():
            parameter.grad = parameter.grad + 0 * torch.empty_like(parameter)


class LooksAtAllForEach(Around):
    """Looks at every parameter for every parameter that it has."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        parameters = list(self.module.parameters())
        for _ in parameters:
            for other in parameters:
                other.numel()


class DecaysGradients(Around):
    """Adds a thousandth of the weight to its gradient, whatever the loss."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        decay = sum(parameter.square().sum() for parameter in self.module.parameters()) / 2000
        self.right.backward(loss + decay, retain_graph=retain_graph)


class BucketsCount(Around):
    """Takes the size of its buckets for a factor."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        size = self.config.options.get("zero_optimization", {}).get("reduce_bucket_size", 0)
        self.right.backward(loss * (1.5 if size == 1 else 1.0), retain_graph=retain_graph)


class AlwaysTheMean(Around):
    """Reduces by the mean, whatever was asked for."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, reduction=Reduction.MEAN))


class ForgetsTheUnsynced(Around):
    """What was accumulated inside no_sync is gone when it ends."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.right.no_sync():
            yield
        self.right.zero_grad()


class ClipsToHalf(Around):
    """Clips to half the norm that was asked for."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=config.clip and config.clip / 2))


class RemembersForwards(Around):
    """Divides each loss by the number of forwards since the last backward."""

    forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss / max(self.forwards, 1), retain_graph=retain_graph)
        self.forwards = 0


holds_the_state_twice: Factory = HoldsTheStateTwice
sends_twice: Factory = SendsTwice
stays_gathered: Factory = StaysGathered
leaves_tensors_behind: Factory = LeavesTensorsBehind
reads_fresh_memory: Factory = ReadsFreshMemory
looks_at_all_for_each: Factory = LooksAtAllForEach
decays_gradients: Factory = DecaysGradients
buckets_count: Factory = BucketsCount
always_the_mean: Factory = AlwaysTheMean
forgets_the_unsynced: Factory = ForgetsTheUnsynced
clips_to_half: Factory = ClipsToHalf
remembers_forwards: Factory = RemembersForwards
