"""Mutants that are wrong only if a step does not use every parameter, or for unusual batches and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import AccumulationOwner, EngineConfig
from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, deepspeed, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def expert_target(law: str, variant: str = "", part: Part | None = Part.OPTIMIZER, cause: str = "") -> Target:
    """Return the target in a law whose model is ``experts``."""
    return Target(law, part, model="experts", variant=variant, cause=cause)


class CountsMicroBatches(EngineWrapper):
    """The base class of mutants that record which micro-batches of a window made a gradient of each parameter."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.micro = 0
        self.uses: dict[str, list[int]] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.count, name))  # type: ignore[no-untyped-call]

    def count(self, name: str, _grad: Tensor) -> None:
        """Record that this micro-batch made a gradient of the parameter ``name``."""
        self.uses.setdefault(name, []).append(self.micro)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.micro += 1

    def step(self) -> None:
        engine_owns = self.config.accumulation_owner is AccumulationOwner.ENGINE
        if not engine_owns or self.micro == self.config.accumulation_steps:
            self.before_step()
            self.micro, self.uses = 0, {}
        self.base.step()

    def before_step(self) -> None:
        """Change gradients before the step at the end of an accumulation window; subclasses override this method."""


@mutant(
    FaultKind.CONTRIBUTION,
    expert_target("window.partly_used", "first_2_by_engine"),
    expert_target("window.partly_used", "first_2_by_caller"),
    origin=Origin.CIRCUMSTANCES,
)
class StepsWithTheLastMicroBatch(CountsMicroBatches):
    """Drops the gradient of a parameter that the last micro-batch of an accumulation window did not use."""

    def before_step(self) -> None:
        for name, parameter in self.module.named_parameters():
            if self.uses.get(name) and self.micro - 1 not in self.uses[name]:
                parameter.grad = None


@mutant(
    FaultKind.SCALE,
    expert_target("window.partly_used", "last_2_by_engine"),
    expert_target("window.partly_used_on_some_ranks", "in_turns_2_by_caller"),
    origin=Origin.CIRCUMSTANCES,
)
class AveragesOverUses(CountsMicroBatches):
    """Averages a gradient over the micro-batches that used the parameter, not over all of the accumulation window."""

    def before_step(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and self.uses.get(name):
                parameter.grad.mul_(self.micro / len(self.uses[name]))


@mutant(
    FaultKind.STALE,
    expert_target("idle.whole_step"),
    origin=Origin.CIRCUMSTANCES,
    imitates=deepspeed(8045),
)
class StepsWithOldGradients(EngineWrapper):
    """If a step does not use a parameter, updates the parameter with its gradient from the step before."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.old: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        for parameter, grad in self.old.items():
            if parameter.grad is None:
                parameter.grad = grad
        self.old = {
            parameter: parameter.grad.clone() for parameter in self.parameters_with_grad() if parameter.grad is not None
        }
        self.base.step()


@mutant(FaultKind.STALE, expert_target("idle.zeroed_in_place"), origin=Origin.CIRCUMSTANCES)
class TakesZerosForMissing(StepsWithOldGradients):
    """Keeps gradients of zeros in ``zero_grad``, and replaces them in a step by the gradients of the step before."""

    def zero_grad(self) -> None:
        zeros = [parameter for parameter in self.parameters_with_grad() if not is_nonzero(parameter.grad)]
        self.base.zero_grad()
        for parameter in zeros:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        for parameter, grad in self.old.items():
            if parameter.grad is not None and not is_nonzero(parameter.grad):
                parameter.grad = grad
        self.old = {
            parameter: parameter.grad.clone() for parameter in self.parameters_with_grad() if parameter.grad is not None
        }
        self.base.step()


def is_nonzero(grad: Tensor | None) -> bool:
    """Return whether a gradient has an element that is not zero."""
    return grad is not None and bool(grad.any())


@mutant(
    FaultKind.PARAMETERS,
    expert_target("idle.frozen", "after_a_step"),
    origin=Origin.CIRCUMSTANCES,
)
class StepsFrozenWeights(StepsWithOldGradients):
    """Updates a weight once more after the caller has frozen it, with the gradient of the step before."""

    def step(self) -> None:
        with torch.no_grad():
            for parameter, grad in self.old.items():
                if not parameter.requires_grad:
                    parameter.sub_(grad)
        self.old = {
            parameter: parameter.grad.clone() for parameter in self.parameters_with_grad() if parameter.grad is not None
        }
        self.base.step()


@mutant(FaultKind.PARAMETERS, expert_target("idle.frozen", "before_any_step"), origin=Origin.CIRCUMSTANCES)
class ForgetsUnfrozenWeights(EngineWrapper):
    """Updates only the weights that the first step updated."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first: set[nn.Parameter] = set()

    def step(self) -> None:
        self.first = self.first or set(self.parameters_with_grad())
        for parameter in self.parameters_with_grad():
            if parameter not in self.first:
                parameter.grad = None
        self.base.step()


@mutant(
    FaultKind.SCALE,
    expert_target("batches.shapes", "rows"),
    expert_target("batches.shapes", "rows_2_by_engine"),
    expert_target("batches.shapes", "sequences"),
    expert_target("batches.shapes", "empty"),
    expert_target("batches.shapes", "equal_rows"),
    origin=Origin.CIRCUMSTANCES,
)
class AssumesEqualBatches(EngineWrapper):
    """Multiplies a loss by the ratio of its micro-batch's size to the size of rank 0's first micro-batch."""

    first = torch.zeros(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.current = torch.tensor(float(args[0].numel()))
        if not bool(self.first):
            self.first = self.current.clone()
            dist.broadcast(self.first, 0)
            self.first.clamp_(min=1)
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * float(self.current / self.first), retain_graph=retain_graph)


@mutant(
    FaultKind.STALE,
    expert_target("batches.module_order"),
    expert_target("batches.module_order", "2_by_engine"),
    origin=Origin.CIRCUMSTANCES,
)
class ExpectsTheFirstOrder(EngineWrapper):
    """Gives the gradient of the n-th module of a forward to the module that was n-th in the first forward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.orders: list[list[nn.Module]] = []
        layers: Any = self.module
        self.hooks = [expert.register_forward_hook(self.add) for expert in layers.experts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.orders.append([])
        return self.base(*args, **kwargs)

    def add(self, module: nn.Module, *_: Any) -> None:
        """Add a module to the order of this forward."""
        self.orders[-1].append(module)

    def step(self) -> None:
        grads = {module: [parameter.grad for parameter in module.parameters()] for module in self.orders[-1]}
        for expected, found in zip(self.orders[0], self.orders[-1], strict=False):
            for parameter, grad in zip(expected.parameters(), grads[found], strict=True):
                parameter.grad = None if grad is None else grad.clone()
        self.base.step()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.base.close()


@mutant(
    FaultKind.SCALE,
    expert_target("values.zero_loss", "one_rank"),
    expert_target("values.zero_loss", "one_rank_2_by_engine"),
    origin=Origin.CIRCUMSTANCES,
)
class AveragesOverNonzeroLosses(EngineWrapper):
    """Averages gradients over the ranks whose loss is not zero."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        count = (loss.detach() != 0).float()
        dist.all_reduce(count)
        factor = dist.get_world_size() / float(count) if float(count) else 1.0
        self.base.backward(loss * factor, retain_graph=retain_graph)


@mutant(
    FaultKind.CLIPPING,
    expert_target("values.zero_loss", "all_ranks_clipped", None, "NonFiniteError"),
    origin=Origin.CIRCUMSTANCES,
)
class DividesByTheNorm(EngineWrapper):
    """If clipping is configured, divides gradients by their norm, so that gradients of zero become NaN."""

    def step(self) -> None:
        if self.config.clip is not None and not any(
            is_nonzero(parameter.grad) for parameter in self.parameters_with_grad()
        ):
            for parameter in self.parameters_with_grad():
                parameter.grad = torch.full_like(parameter, torch.nan)
        self.base.step()


@mutant(
    FaultKind.STALE,
    expert_target("values.discarded", "inf", None, "NonFiniteError"),
    expert_target("values.discarded", "nan_2_by_engine", None, "NonFiniteError"),
    origin=Origin.CIRCUMSTANCES,
)
class ZeroesByMultiplication(EngineWrapper):
    """Multiplies gradients by zero in ``zero_grad``, which keeps NaN and makes NaN of infinity."""

    def zero_grad(self) -> None:
        zeros = {
            parameter: 0 * parameter.grad for parameter in self.parameters_with_grad() if parameter.grad is not None
        }
        self.base.zero_grad()
        for parameter, grad in zeros.items():
            parameter.grad = grad


@mutant(
    FaultKind.CLIPPING,
    expert_target("values.norm_of_tiny", part=Part.REDUCTION),
    expert_target("values.norm_of_tiny", "2_by_engine", Part.REDUCTION),
    origin=Origin.CIRCUMSTANCES,
)
class CountsTinyOnEveryRank(EngineWrapper):
    """Counts a parameter in the norm once for each rank, if the parameter has fewer elements than there are ranks."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(norm: Callable[[], float]) -> Callable[[], float]:
            def norm_of_copies() -> float:
                grads = seams.reduced_grads(self.base).values()
                tiny = [grad for grad in grads if grad.numel() < dist.get_world_size()]
                extra = sum(float(grad.double().square().sum()) for grad in tiny) * (dist.get_world_size() - 1)
                return math.sqrt(norm() ** 2 + extra)

            return norm_of_copies

        seams.wrap_grad_norm(self.base, wrap)


@mutant(
    FaultKind.SCALE,
    expert_target("window.evaluated", "4_by_engine", Part.LOCAL_GRADIENT),
    origin=Origin.BLIND_7,
)
class CountsEvaluations(EngineWrapper):
    """Counts a forward without gradients as a micro-batch of the engine's accumulation window."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if not torch.is_grad_enabled() and self.config.accumulation_owner is AccumulationOwner.ENGINE:
            self.base.step()
        return output


@mutant(
    FaultKind.CONTRIBUTION,
    expert_target("window.evaluated", "2_by_engine", Part.OPTIMIZER),
    origin=Origin.BLIND_9,
)
class EvaluationDropsTheWindow(EngineWrapper):
    """Drops the gradients of an accumulation window if a forward runs in evaluation mode without gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and not self.module.training:
            for parameter in self.module.parameters():
                parameter.grad = None
        return self.base(*args, **kwargs)
