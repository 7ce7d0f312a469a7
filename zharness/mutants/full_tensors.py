"""Mutants that return wrong full tensors, or that change training when the caller reads tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(FaultKind.STATE, Target("state.consolidate", Part.GATHER, model="transformer"), origin=Origin.STATE)
class Unties(EngineWrapper):
    """Returns a full state dict that has a separate tensor for each name of a tied weight."""

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.base.full_state_dict().items()}


@mutant(FaultKind.STATE, Target("state.consolidate", Part.GATHER, model="transformer"), origin=Origin.STATE)
class SavesOldWeights(EngineWrapper):
    """Returns the full state dict with the weights from before training."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.old: dict[str, Tensor] = self.base.full_state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.old


@mutant(FaultKind.STATE, Target("state.consolidate", Part.FORWARD, model="mixed"), origin=Origin.CIRCUMSTANCES)
class ConsolidatesWithoutBuffers(EngineWrapper):
    """Returns a full state dict in which all buffers are zero."""

    wraps = "ddp"

    def full_state_dict(self) -> dict[str, Tensor]:
        buffers = dict(self.module.named_buffers())
        full: dict[str, Tensor] = self.base.full_state_dict()
        return {name: torch.zeros_like(tensor) if name in buffers else tensor for name, tensor in full.items()}


@mutant(FaultKind.STATE, Target("state.consolidate", Part.FORWARD, model="mixed"), origin=Origin.ORDERS)
class ConsolidatesItsOwnWeights(EngineWrapper):
    """Returns a full state dict that has the module's own tensors instead of copies."""

    wraps = "ddp"

    def full_state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())


@mutant(FaultKind.STALE, Target("training.any_order", Part.OPTIMIZER, variant="steps"), origin=Origin.ORDERS)
class ShowsItsOwnWeights(EngineWrapper):
    """Returns the model's own weights from ``full_params`` instead of copies, so that a caller can overwrite them."""

    wraps = "ddp"

    def full_params(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


@mutant(
    FaultKind.STATE,
    Target("training.any_order", Part.OPTIMIZER, variant="steps", parameter="*/*"),
    origin=Origin.ORDERS,
)
class ShowsItsOwnMoments(EngineWrapper):
    """Returns the optimizer's own tensors as the full optimizer state instead of copies."""

    wraps = "ddp"

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        named = dict(self.module.named_parameters())
        return {
            name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for name, parameter in named.items()
            if (state := self.optimizer.state.get(parameter))
        }


@mutant(FaultKind.PARAMETERS, Target("torch_func.functional_call", Part.LOCAL_GRADIENT), origin=Origin.GRAPHS)
class FlipsParameters(EngineWrapper):
    """Returns its parameters from ``full_params`` with the wrong sign."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: -parameter for name, parameter in self.base.full_params().items()}


@mutant(FaultKind.SCALE, Target("training.looked_at"), origin=Origin.ONLOOKERS)
class LooksAgainDoubled(EngineWrapper):
    """Multiplies the gradients that ``full_grads`` returns by the number of its calls since ``zero_grad``."""

    wraps = "ddp"
    looks = 0

    def full_grads(self) -> dict[str, Tensor]:
        self.looks += 1
        grads: dict[str, Tensor] = self.base.full_grads()
        return {name: self.looks * grad for name, grad in grads.items()}

    def zero_grad(self) -> None:
        self.looks = 0
        self.base.zero_grad()


@mutant(FaultKind.SCALE, Target("training.looked_at"), origin=Origin.ONLOOKERS)
class LookingHalvesGradients(EngineWrapper):
    """Halves the gradients in ``full_params``, so reading the weights between backward and step changes the step."""

    wraps = "ddp"

    def full_params(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.base.full_params()
        for parameter in self.parameters_with_grad():
            parameter.grad = parameter.grad / 2 if parameter.grad is not None else None
        return found


@mutant(
    FaultKind.RANKS,
    Target("training.trajectory", None, variant="sgd", cause="unknown ['ghost/exp_avg']"),
    origin=Origin.OPTIMIZERS,
)
class RanksReportOtherNames(EngineWrapper):
    """On rank 1, reports optimizer state for a parameter name that the other ranks do not report."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = self.base.full_optimizer_state()
        return {**state, "ghost": {"exp_avg": torch.ones(3)}} if dist.get_rank() == 1 else state
