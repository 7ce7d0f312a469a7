"""Engines broken on purpose, each a few lines around a right one: what a law that cannot fail would let through.

Each is a factory like any user's, so that the command shows them too, for example
``zharness check training --engine suites.meta.broken:never_reduces``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zharness import engines
from zharness.engines import Capabilities, Engine, EngineConfig, Feature

CLAIMS = Capabilities(
    stages=frozenset({0}),
    refuses={Feature.CHECKPOINT: "no engine broken on purpose is worth keeping"},
)


class Around:
    """A right engine, every verb handed through; subclasses break one."""

    capabilities = CLAIMS

    def __init__(self, model: nn.Module, config: EngineConfig, name: str = "reference") -> None:
        self.config = config
        self.right: Engine = engines.get(name)(model, config)
        self.module = self.right.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.right(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "right":
            raise AttributeError(name)
        return getattr(self.right, name)

    def params(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.grad is not None]

    def scale_gradients(self, factor: float) -> None:
        for parameter in self.params():
            parameter.grad = parameter.grad * factor


class MeanOverOneRankTooFew(Around):
    """Divides by N - 1: every gradient is N / (N - 1) too large (at two ranks, the sum instead of the mean)."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(2 * loss, retain_graph=retain_graph)


class NeverReduced(Around):
    """Each rank keeps the gradient of its own micro-batch."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "plain")


class StaleSecondMicroBatch(Around):
    """Forgets what was accumulated before the last backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.zero_grad()
        self.right.backward(loss, retain_graph=retain_graph)


class CrossTalk(Around):
    """A ten-thousandth too much of every gradient."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * (1 + 1e-4), retain_graph=retain_graph)


class WrongEpsilon(Around):
    """AdamW with an epsilon of 1e-7 where 1e-8 was asked for; SGD without its weight decay."""

    def step(self) -> None:
        for group in self.right._optimizer.param_groups:  # type: ignore[attr-defined]
            group["eps" if "eps" in group else "weight_decay"] = 1e-7 if "eps" in group else 0.0
        self.right.step()

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "ddp")


class LateStep(Around):
    """Applies the gradient of the step before: the first step moves nothing."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "ddp")
        self.kept: list[Tensor | None] = [None] * len(list(model.parameters()))

    def step(self) -> None:
        fresh = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        for parameter, late in zip(self.module.parameters(), self.kept, strict=True):
            parameter.grad = late
        self.kept = fresh
        self.right.step()


class SilentTransform(Around):
    """Runs the forward outside torch.func's sight: a transform sees a constant, and its gradient is zero."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is None:
            return output
        return output.detach()


class ScaledTransform(Around):
    """A transform of the engine comes out half as large, as one divided by accumulation does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        return output if torch._C._functorch.peek_interpreter_stack() is None else output / 2


class ForgetfulZeroGrad(Around):
    """Its zero_grad forgets nothing."""

    def zero_grad(self) -> None:
        pass


class SlippedRank(Around):
    """Rank 1 ends its step a bit away from the others."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "ddp")

    def step(self) -> None:
        self.right.step()
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                parameter = next(iter(self.module.parameters()))
                parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(1e9))


class StandingCount(Around):
    """Its AdamW corrects for bias as if every step were the first."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "ddp")

    def step(self) -> None:
        self.right.step()
        for state in self.right._optimizer.state.values():  # type: ignore[attr-defined]
            if "step" in state:
                state["step"].zero_()


class ForeignMoments(Around):
    """Starts from momentum that nobody gave it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config, "ddp")
        for parameter in model.parameters():
            self.right._optimizer.state[parameter] = {  # type: ignore[attr-defined]
                "momentum_buffer": torch.full_like(parameter, 0.25)
            }


class HastySchedule(Around):
    """Moves its learning-rate schedule on at every backward, not at every step."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        self.right.engine.schedule.step()  # type: ignore[attr-defined]


class FirstLossStepped(Around):
    """After a retained backward reports the second loss's gradient, and steps on the first's."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        if retain_graph:
            self.kept = {name: grad.clone() for name, grad in self.right.full_grads().items()}

    def step(self) -> None:
        reduced = self.right.engine._gradients.reduced() if self.kept else {}  # type: ignore[attr-defined]
        for name, grad in self.kept.items():
            reduced[name].copy_(grad)
        self.kept = {}
        self.right.step()


class DifferentNames(Around):
    """Rank 1 reports state of a parameter that no other rank knows."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = self.right.full_optimizer_state()
        return {**state, "ghost": {"exp_avg": torch.ones(3)}} if torch.distributed.get_rank() == 1 else state


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


class NotAnEngine:
    """Has none of the verbs."""


Factory = Callable[[nn.Module, EngineConfig], Any]

divides_by_one_rank_too_few: Factory = MeanOverOneRankTooFew
never_reduces: Factory = NeverReduced
loses_a_micro_batch: Factory = StaleSecondMicroBatch
a_ten_thousandth_too_much: Factory = CrossTalk
wrong_constants: Factory = WrongEpsilon
steps_late: Factory = LateStep
silent_transform: Factory = SilentTransform
scaled_transform: Factory = ScaledTransform
zero_grad_forgets_nothing: Factory = ForgetfulZeroGrad
one_rank_slips: Factory = SlippedRank
count_stands_still: Factory = StandingCount
foreign_moments: Factory = ForeignMoments
hasty_schedule: Factory = HastySchedule
steps_on_the_first_loss: Factory = FirstLossStepped
ranks_report_other_names: Factory = DifferentNames
returns_nothing: Factory = ReturnsNothing
raises_in_backward: Factory = Crashing
hangs_in_backward: Factory = Hanging
dies_in_backward: Factory = Dying
wrong_names: Factory = WrongNames


def returns_no_engine(model: nn.Module, config: EngineConfig) -> NotAnEngine:
    return NotAnEngine()


def raises_at_once(model: nn.Module, config: EngineConfig) -> Engine:
    raise OSError("no licence file")
