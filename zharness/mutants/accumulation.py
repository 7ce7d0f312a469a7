"""Mutants that count the micro-batches of an accumulation window wrongly, or divide by a wrong number of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    AccumulationOwner,
    EngineConfig,
    Reduction,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import CountsMicroBatches, EngineWrapper, in_backward
from zharness.parity import Part


@mutant(
    FaultKind.SCALE, Target("training.accumulation", variant="engine"), origin=Origin.SCALE, imitates=deepspeed(8224)
)
class DividesTwiceByTheAccumulation(EngineWrapper):
    """Divides both the loss and the gradient by the accumulation steps."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.base.backward(loss / self.config.accumulation_steps if owned else loss, retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.accumulation", variant="engine"), origin=Origin.SCALE)
class NeverDividesByTheAccumulation(EngineWrapper):
    """Sums the gradients of an accumulation window's micro-batches instead of averaging them."""

    stages = (2,)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.base.backward(loss * self.config.accumulation_steps if owned else loss, retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.accumulation", variant="engine"), origin=Origin.ONLOOKERS)
class ScaleDivides(EngineWrapper):
    """Divides the loss by the accumulation steps in ``scale``, although the engine also divides gradients by them."""

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.base.scale(loss)
        return scaled / self.config.accumulation_steps


@mutant_factory(
    FaultKind.SCALE,
    Target("backward.autograd_grad", model="blocks"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def sum_forgets_accumulation(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Under reduction by sum, does not divide by the accumulation steps, although the engine owns accumulation."""
    engine = seams.build(model, config)
    if config.reduction is Reduction.SUM:
        seams.set_divisor(engine, 1)
    return engine


@mutant(
    FaultKind.CONTRIBUTION,
    Target("training.accumulation", Part.ACCUMULATION, variant="caller"),
    Target("training.accumulation", Part.ACCUMULATION, model="exact", variant="caller"),
    Target("training.several_backwards", Part.ACCUMULATION),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(7718),
)
class LosesAMicroBatch(EngineWrapper):
    """Drops, in each backward, the gradients that earlier backwards accumulated."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.zero_grad()
        self.base.backward(loss, retain_graph=retain_graph)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("training.accumulation", Part.ACCUMULATION, variant="engine"),
    origin=Origin.CONTRIBUTIONS,
)
class CountsTheLastMicroBatchTwice(EngineWrapper):
    """Counts the last micro-batch of an accumulation window twice if the engine owns accumulation."""

    seen = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        steps = self.config.accumulation_steps
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.seen = self.seen % steps + 1
        twice = owned and steps > 1 and self.seen == steps
        self.base.backward(2 * loss if twice else loss, retain_graph=retain_graph)


class _CountsBackwards(ReferenceEngine):
    """A ReferenceEngine that counts every backward as a micro-batch."""

    backwards = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.backwards += 1
        super().backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        self.backwards += 1
        return super().scale(loss)

    def step(self) -> None:
        seams.set_micro_batches(self, max(seams.micro_batches(self), self.backwards - 1))
        super().step()
        self.backwards *= bool(seams.micro_batches(self))

    def zero_grad(self) -> None:
        super().zero_grad()
        self.backwards = 0

    def load(self, path: Path) -> None:
        super().load(path)
        self.backwards = 0


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.several_backwards", Part.OPTIMIZER, variant="window"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def boundary_counts_backwards(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Counts every backward as a micro-batch, even if several backwards belong to one micro-batch.

    If a micro-batch has two losses, and therefore two backwards, the optimizer steps too early.
    """
    return seams.build(model, config, _CountsBackwards)


class _KeepsCount(ReferenceEngine):
    """A ReferenceEngine whose ``zero_grad`` does not reset the count of micro-batches."""

    def zero_grad(self) -> None:
        count = seams.micro_batches(self)
        super().zero_grad()
        seams.set_micro_batches(self, count)


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.several_backwards", Part.OPTIMIZER, variant="given_up"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def zero_grad_keeps_count(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Drops the gradients of an open accumulation window in ``zero_grad``, but keeps the micro-batch count.

    The next boundary comes too early: the step divides the sum of too few micro-batches by the full number.
    """
    return seams.build(model, config, _KeepsCount)


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.several_backwards", Part.OPTIMIZER, variant="given_up"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def window_survives_zero_grad(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Drops the gradients of an open accumulation window in ``zero_grad``, but not its count of micro-batches.

    The next step uses the gradients of too few micro-batches and divides them by the full number.
    """
    return seams.build(model, config, _KeepsCount)


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("torch_func.grad", Part.ACCUMULATION),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def forwards_are_counted(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Counts forwards with gradients as micro-batches, instead of calls of ``step``, if the engine owns accumulation.

    If a loss uses two forwards (of two views, or of a discriminator on real and generated data), the accumulation
    window ends after half of its micro-batches.
    """
    seen = SimpleNamespace(forwards=0)

    class Counting(ReferenceEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.forwards += torch.is_grad_enabled() and in_backward() == -1
            return super().__call__(*args, **kwargs)

        def step(self) -> None:
            seams.set_micro_batches(self, seams.micro_batches(self) + max(0, seen.forwards - 1))
            seen.forwards = 0
            super().step()

        def zero_grad(self) -> None:
            seen.forwards = 0
            super().zero_grad()

    return seams.build(model, config, Counting)


@mutant(FaultKind.CONTRIBUTION, Target("training.forward_alone", variant="no_grad"), origin=Origin.CONTRIBUTIONS)
class RemembersForwards(EngineWrapper):
    """Divides each loss by the number of forwards since the last backward."""

    forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss / max(self.forwards, 1), retain_graph=retain_graph)
        self.forwards = 0


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of samples in the arguments of a forward, which is the length of the first tensor."""
    return next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


@mutant(FaultKind.SCALE, Target("training.any_order", Part.LOCAL_GRADIENT, variant="sums"), origin=Origin.ORDERS)
class WeighsByTheFirstBatch(EngineWrapper):
    """Multiplies a loss by its micro-batch's size over the first micro-batch's size, as if losses were sums."""

    wraps = "ddp"
    first = rows = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.rows = count_rows(args, kwargs)
        self.first = self.first or self.rows
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * (self.rows / self.first), retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.any_order", variant="steps"), origin=Origin.ORDERS)
class TakesGraphsForBatches(EngineWrapper):
    """Counts a forward in eval mode as a micro-batch, so the next loss is divided by a number that is too large."""

    wraps = "ddp"
    graphs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.graphs += torch.is_grad_enabled() and not self.module.training
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss / (1 + self.graphs), retain_graph=retain_graph)
        self.graphs = 0


@mutant(
    FaultKind.CONTRIBUTION,
    Target("training.trajectory", None, variant="adamw", cause="full_grads has the wrong names"),
    origin=Origin.CIRCUMSTANCES,
)
class DropsWhatIsPending(EngineWrapper):
    """Does nothing in ``backward`` if ``zero_grad`` was called after the forward that computed the loss."""

    forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += torch.is_grad_enabled()
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.forwards:
            self.base.backward(loss, retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.forwards = 0
        self.base.zero_grad()


@mutant(
    FaultKind.SCALE,
    Target("training.several_backwards", Part.OPTIMIZER, variant="same_loss"),
    origin=Origin.BLIND_10,
)
class CountsASecondBackwardOfALoss(EngineWrapper):
    """Counts a second backward of the same loss as a further micro-batch of the window."""

    last_loss: Tensor | None = None

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        if loss is self.last_loss:
            seams.set_micro_batches(self.base, seams.micro_batches(self.base) + 1)
        self.last_loss = loss


@mutant(
    FaultKind.SCALE,
    Target("window.mixed_calls", Part.OPTIMIZER, model="experts", variant="2_by_engine"),
    origin=Origin.BLIND_11,
)
class DividesEngineBackwardsAlone(CountsMicroBatches):
    """Does not divide the gradients of a ``loss.backward()`` that follows an ``engine.backward(loss)`` in a window."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.calls = [0]  # the numbers of calls of engine.backward in the micro-batches of the window so far
        self.before: dict[nn.Parameter, Tensor] = {}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.calls[-1] += 1

    def step(self) -> None:
        if any(self.calls) and not self.calls[-1]:
            for parameter in self.parameters_with_grad():
                assert parameter.grad is not None
                parameter.grad += (self.window - 1) * (parameter.grad - self.before.get(parameter, 0))
        self.count_step()
        self.calls = [*self.calls, 0] if self.micro else [0]
        self.before = (
            {p: p.grad.clone() for p in self.parameters_with_grad() if p.grad is not None} if self.micro else {}
        )
        self.base.step()
