"""Define mutants whose fault shows only if two circumstances meet, such as a read gradient and an idle weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import CountsMicroBatches, EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.CONTRIBUTION,
    Target("window.partly_used", Part.OPTIMIZER, model="experts", variant="first_2_by_engine_read"),
    origin=Origin.BLIND_10,
)
class LosesWhatWasReadAndIsIdle(CountsMicroBatches):
    """Drops a gradient that is read inside an engine's window if no later micro-batch of the window uses the weight."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.last_read: dict[str, Tensor] = {}

    def full_grads(self) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = self.base.full_grads()
        if self.micro + 1 < self.window:
            self.last_read = {name: grad.clone() for name, grad in grads.items()}
        return grads

    def step(self) -> None:
        self.count_step()
        if self.micro == 0:
            grads = self.base.full_grads()
            for name, grad in self.last_read.items():
                if torch.equal(grad, grads[name]):
                    self.base.write_grad(name, torch.zeros_like(grad))
            self.last_read = {}
        self.base.step()


@mutant(
    FaultKind.CLIPPING,
    Target("window.partly_used_on_some_ranks", Part.REDUCTION, "experts", "changing_ranks_1_norm", parameter="norm"),
    origin=Origin.BLIND_10,
)
class NormOfWeightsThatThisRankUsed(EngineWrapper):
    """Leaves the gradients of weights that this rank did not use out of the norm, even if other ranks used them."""

    used_norm: float | None = None

    def step(self) -> None:
        names = [name for name, parameter in self.module.named_parameters() if parameter.grad is not None]
        grads = self.base.full_grads()
        self.used_norm = math.sqrt(sum(float(grads[name].double().square().sum()) for name in names if name in grads))
        self.base.step()

    def grad_norm(self) -> float | None:
        return None if self.base.grad_norm() is None else self.used_norm


@mutant(
    FaultKind.PARAMETERS,
    Target("idle.momentum", Part.OPTIMIZER, model="experts", variant="groups"),
    origin=Origin.BLIND_10,
)
class MovesIdleWeightsOfLaterGroups(EngineWrapper):
    """Gives idle weights of all parameter groups but the first a gradient of zero, so that momentum moves them."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.patterns = [group.pattern for group in config.optimizer.groups]
        self.stepped: set[str] = set()

    def step(self) -> None:
        grads = self.base.full_grads()
        for name, value in self.base.full_params().items():
            is_later = any(fnmatchcase(name, pattern) for pattern in self.patterns)
            if is_later and name not in grads and name in self.stepped:
                self.base.write_grad(name, torch.zeros_like(value))
        self.stepped |= grads.keys()
        self.base.step()


@mutant(
    FaultKind.STALE,
    Target("idle.frozen", Part.OPTIMIZER, model="experts", variant="from_construction_1"),
    origin=Origin.BLIND_10,
)
class ForwardsWithWeightsFromBeforeUnfreezing(EngineWrapper):
    """In forwards, uses the first values of weights that were frozen at construction, even once they are trained."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        super().__init__(model, config)
        self.first_values = [(parameter, parameter.detach().clone()) for parameter in frozen]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trained = [(parameter, parameter.data) for parameter, _ in self.first_values]
        for parameter, value in self.first_values:
            parameter.data = value
        output = self.base(*args, **kwargs)
        for parameter, value in trained:
            parameter.data = value
        return output


@mutant(
    FaultKind.CONTRIBUTION,
    Target("window.partly_used", Part.OPTIMIZER, model="experts", variant="every_other_4_by_engine"),
    origin=Origin.BLIND_10,
)
class LosesWhatIsBeforeAGap(CountsMicroBatches):
    """Drops the gradient that a weight had before a gap in an engine's window.

    A gap is a micro-batch that does not use the weight, before a later micro-batch that uses it.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.previous: dict[str, Tensor] = {}
        self.before_gap: dict[str, Tensor] = {}
        self.lost: dict[str, Tensor] = {}

    def step(self) -> None:
        if self.window > 1:
            self.count_step()
            self.find_gaps({name: grad.clone() for name, grad in self.base.full_grads().items()})
        self.base.step()

    def find_gaps(self, grads: dict[str, Tensor]) -> None:
        """Find gradients that stay equal and change later, and subtract their old values at the window's end."""
        for name, grad in grads.items():
            if name in self.previous and torch.equal(grad, self.previous[name]):
                self.before_gap[name] = grad
            elif name in self.before_gap:
                self.lost[name] = self.before_gap.pop(name)
        self.previous = grads
        if self.micro == 0:
            for name, value in self.lost.items():
                self.base.write_grad(name, grads[name] - value)
            self.previous, self.before_gap, self.lost = {}, {}, {}


@mutant(
    FaultKind.CONTRIBUTION,
    Target("values.discarded", Part.OPTIMIZER, model="experts", variant="in_no_sync"),
    Target("values.discarded", Part.OPTIMIZER, model="experts", variant="idle_in_no_sync"),
    origin=Origin.BLIND_10,
)
class ZeroGradInsideNoSyncDropsNothing(EngineWrapper):
    """Keeps the gradients in ``zero_grad`` inside ``no_sync``, as if the reducing backward still needed them."""

    deferring = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.base.no_sync():
            self.deferring += 1
            try:
                yield
            finally:
                self.deferring -= 1

    def zero_grad(self) -> None:
        if not self.deferring:
            self.base.zero_grad()


@mutant(
    FaultKind.OPTIMIZER,
    Target("values.schedule", Part.OPTIMIZER, model="experts", variant="no_backward", parameter="learning rate"),
    origin=Origin.BLIND_10,
)
class StepWithoutGradientsKeepsTheRate(EngineWrapper):
    """Does nothing in a step in which no weight has a gradient, so that the schedule does not advance."""

    def step(self) -> None:
        if self.base.full_grads():
            self.base.step()
