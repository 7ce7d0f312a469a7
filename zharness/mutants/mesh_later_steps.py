"""Define mutants on tp that are right in a first backward, and wrong at later weights or after another call.

The laws that kill these mutants use random models, whose gradients tier C judges on tp, or use the exact model instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import TENSOR
from zharness.mutants.mesh import TP2, MeshWrapper, local_grad
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_two_ranks(law: str, part: Part | None = Part.REDUCTION, variant: str = "", model: str = "mlp") -> Target:
    """Return a target on two ranks of tp, which train one micro-batch."""
    return Target(law, part, model, variant, mesh=TP2)


class CountsSteps(MeshWrapper):
    """The base class of mutants that are right before the first step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.steps = 0

    def step(self) -> None:
        self.base.step()
        self.steps += 1


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_two_ranks("training.trajectory", variant="adamw"),
    on_two_ranks("training.trajectory", variant="sgd"),
    origin=Origin.MESH,
)
class RoundsSplitGradientsOfLaterSteps(CountsSteps):
    """After the first step, rounds to bf16 the gradients of weights that tp splits."""

    def spoil_gradients(self) -> None:
        for param in self.split_params() if self.steps else ():
            local_grad(param).copy_(local_grad(param).bfloat16())


@mutant(FaultKind.OPTIMIZER, on_two_ranks("training.free_running", Part.OPTIMIZER), origin=Origin.MESH)
class DecaysSplitWeightsTwice(CountsSteps):
    """After the first step, shrinks the split weights of the second rank of tp by 0.1 % once more in each step."""

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            for param in self.split_params() if self.steps > 1 and self.coordinates[TENSOR] else ():
                param.to_local().mul_(0.999)


@mutant(
    FaultKind.CONTRIBUTION,
    on_two_ranks("training.forward_alone", Part.FORWARD, "no_grad", "exact"),
    on_two_ranks("training.forward_alone", Part.FORWARD, "eval", "exact"),
    origin=Origin.MESH,
)
class EvaluatesWithItsOwnPart(MeshWrapper):
    """Does not sum the outputs of a row-wise layer over tp in a forward in evaluation mode or without gradients."""

    stages = (3,)

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("last" if hasattr(self.module, "last") else "down")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            return output
        return nn.functional.linear(inputs[0].to_local(), module.weight.to_local(), module.bias.to_local())


@mutant(FaultKind.CONTRIBUTION, on_two_ranks("training.several_backwards", model="exact"), origin=Origin.MESH)
class KeepsTheLastBackwardOfSplitWeights(MeshWrapper):
    """On the second rank of tp, zeroes the gradients of split weights before each backward, so they do not add up."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        for param in self.split_params() if self.coordinates[TENSOR] else ():
            if param.grad is not None:
                local_grad(param).zero_()
        self.base.backward(loss, retain_graph=retain_graph)


@mutant(
    FaultKind.CLIPPING,
    on_two_ranks("training.loss_scale_power", model="exact"),
    origin=Origin.MESH,
)
class LimitsSplitGradients(MeshWrapper):
    """Clamps each element of a split weight's gradient to the range from -32 to 32."""

    def spoil_gradients(self) -> None:
        for param in self.split_params():
            local_grad(param).clamp_(-32, 32)


@mutant(FaultKind.PARAMETERS, on_two_ranks("parameters.deferred", Part.GATHER), origin=Origin.MESH)
class LeavesDeferredPartsAtZero(MeshWrapper):
    """Zeroes the second tp rank's part of a split weight if the model was on the meta device."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        is_deferred = any(param.is_meta for param in model.parameters())
        super().__init__(model, config)
        with torch.no_grad():
            for param in self.split_params() if is_deferred and self.coordinates[TENSOR] else ():
                param.to_local().zero_()


@mutant(FaultKind.STATE, on_two_ranks("state.reshard", Part.OPTIMIZER), origin=Origin.MESH)
class LoadsNoSplitStateOfAnotherStage(MeshWrapper):
    """At stage 3, zeroes in a load the optimizer state of weights that tp splits."""

    stages = (2, 3)

    def load(self, path: Path) -> None:
        self.base.load(path)
        for param in self.split_params() if self.config.stage == 3 else ():
            for value in self.optimizer.state.get(param, {}).values():
                value.zero_()


@mutant(FaultKind.STATE, on_two_ranks("state.consolidate", Part.GATHER, model="mixed_exact"), origin=Origin.MESH)
class TheFullStateDictHasReversedColumns(MeshWrapper):
    """Reverses the columns of a row-wise layer's weight in the full state dict."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        full["last.weight"] = full["last.weight"].flip(1)
        return full
