"""Mutants whose Muon works on shards, loses its momentum, or scales its update wrongly."""

from __future__ import annotations

from dataclasses import replace

import torch

from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import DDPWrapper, FSDP2Wrapper
from zharness.parity import Part
from zharness.parity.muon import step_like_torch

MUON = Target("training.muon", Part.OPTIMIZER, model="matrices")
DENSE = Target("training.muon", Part.OPTIMIZER, model="dense_matrices")


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class OrthogonalizesShards(DDPWrapper):
    """Orthogonalizes the upper and the lower half of each matrix on their own."""

    def step(self) -> None:
        shards = []
        for parameter in self.parameters_with_grad():
            old = self.optimizer.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
            halves = zip(parameter.detach().chunk(2), parameter.grad.chunk(2), old.chunk(2), strict=True)  # type: ignore[union-attr] # each of these parameters has a gradient
            for weight, grad, momentum in halves:
                shards.append((weight, step_like_torch(weight, grad, momentum, self.config.optimizer.args).weight))
        self.base.step()
        for weight, shard in shards:
            weight.copy_(shard)


@mutant(FaultKind.OPTIMIZER, MUON, replace(MUON, mesh="tp2"), origin=Origin.ORDERS)
class OrthogonalizesOwnRows(FSDP2Wrapper):
    """Orthogonalizes on each rank the rows that the rank owns."""

    def step(self) -> None:
        shards = []
        for parameter in self.parameters_with_grad():
            weight, grad = (tensor.to_local() for tensor in (parameter.detach(), parameter.grad))  # type: ignore[union-attr] # parameters of FSDP2 are DTensors
            state = self.optimizer.state[parameter]
            momentum = state["momentum_buffer"].to_local() if state else torch.zeros_like(weight)
            shards.append((weight, step_like_torch(weight, grad, momentum, self.config.optimizer.args).weight))
        self.base.step()
        for weight, shard in shards:
            weight.copy_(shard)


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class ForgetsMomentumOfMatrices(DDPWrapper):
    """Begins every step with a momentum of zero."""

    def step(self) -> None:
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()
        self.base.step()


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class ScalesTallMatricesAsWide(DDPWrapper):
    """Does not multiply the update of a tall matrix by the square root of its rows divided by its columns."""

    def step(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        tall = [parameter for parameter in self.parameters_with_grad() if parameter.shape[0] > parameter.shape[1]]
        before = [parameter.detach().clone() for parameter in tall]
        self.base.step()
        for parameter, old in zip(tall, before, strict=True):
            rows, columns = parameter.shape
            decayed = old * (1 - rates[0] * self.config.optimizer.args["weight_decay"])
            parameter.detach().sub_(decayed).div_((rows / columns) ** 0.5).add_(decayed)


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class OrthogonalizesTheGradient(DDPWrapper):
    """Orthogonalizes the gradient without the momentum, although it still accumulates the momentum."""

    def step(self) -> None:
        old = {p: dict(self.optimizer.state[p]) for p in self.parameters_with_grad()}
        kept = {p: state["momentum_buffer"].clone() for p, state in old.items() if state}
        for state in old.values():
            if state:
                state["momentum_buffer"].zero_()
        self.base.step()
        beta = self.config.optimizer.args["momentum"]
        for parameter, momentum in kept.items():
            self.optimizer.state[parameter]["momentum_buffer"].add_(momentum, alpha=beta)


@mutant(FaultKind.OPTIMIZER, DENSE, origin=Origin.ORDERS)
class LosesTheCornerOfMatrices(DDPWrapper):
    """Orthogonalizes each matrix without its first element, which is zero in sparse gradients."""

    def step(self) -> None:
        corners = []
        for parameter in self.parameters_with_grad():
            grad = parameter.grad.clone()  # type: ignore[union-attr] # each of these parameters has a gradient
            old = self.optimizer.state[parameter].get("momentum_buffer", torch.zeros_like(parameter)).clone()
            grad[0, 0], old[0, 0] = 0, 0
            corners.append((parameter, step_like_torch(parameter, grad, old, self.config.optimizer.args).weight))
        self.base.step()
        for parameter, weight in corners:
            parameter.detach().copy_(weight)


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class StepsMatricesByTheirGradient(DDPWrapper):
    """Updates each matrix by its gradient, as SGD does, and keeps no momentum."""

    def step(self) -> None:
        options = self.config.optimizer.args
        for parameter in self.parameters_with_grad():
            weight = parameter.detach()
            weight.mul_(1 - options["lr"] * options["weight_decay"]).add_(parameter.grad, alpha=-options["lr"])  # type: ignore[arg-type] # each of these parameters has a gradient


@mutant(FaultKind.OPTIMIZER, MUON, origin=Origin.ORDERS)
class HidesMomentumOfMatrices(DDPWrapper):
    """Reports no momentum of a matrix, although its steps use it."""

    def full_optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {} for name in self.base.full_optimizer_state()}
