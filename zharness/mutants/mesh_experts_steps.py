"""Define mutants that break experts over several steps: windows, rates, saves and loads. They need DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.mutants import seams_engines
from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part

EXPERTS = "moe.experts.*"


def on_steps(law: str, variant: str, part: Part, parameter: str = EXPERTS, model: str = "random_routed") -> Target:
    """Return a target of a law of several steps on two ranks that split four experts."""
    return Target(law, part, model, variant, parameter=parameter, mesh="ep2")


class KnowsItsExperts(ExpertsWrapper):
    """The base class of mutants that change this rank's experts or their optimizer state, without ZeRO."""

    stages = (0,)
    own: tuple[nn.Parameter, ...] = ()

    def spoil(self, layer: Any) -> None:
        self.own += tuple(layer.experts.parameters())


@mutant(FaultKind.STATE, on_steps("state.resume", "sgd", Part.OPTIMIZER, f"{EXPERTS}/*"), origin=Origin.MESH)
class LoadsNoStateOfExperts(KnowsItsExperts):
    """Zeroes the optimizer state of all experts in a load, and restores the state of the other layers."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        state = seams_engines.deepspeed_optimizer(self.base).state
        for value in (value for param in self.own for value in state[param].values() if isinstance(value, Tensor)):
            value.zero_()


@mutant(FaultKind.STATE, on_steps("state.one_folder", "loaded_between", Part.GATHER), origin=Origin.MESH)
class LoadsOldWeightsOfTheLastRanksExperts(KnowsItsExperts):
    """Does not load the experts of the last rank of ep, which keep their weights from before the load."""

    def load(self, path: Path) -> None:
        before = [param.detach().clone() for param in self.own]
        self.base.load(path)
        with torch.no_grad():
            for param, old in zip(self.own, before, strict=True) if self.place == self.size - 1 else ():
                param.copy_(old)


@mutant(
    FaultKind.CONTRIBUTION,
    on_steps("training.accumulation", "caller", Part.ACCUMULATION, model="routed"),
    origin=Origin.MESH,
)
class LosesTheFirstMicroBatchOfExperts(KnowsItsExperts):
    """Drops the gradients of experts, but of no other layers, in the first backward of a step."""

    def spoil(self, layer: Any) -> None:
        super().spoil(layer)
        self.seen: set[nn.Parameter] = set()
        for param in layer.experts.parameters():
            param.register_hook(lambda grad, param=param: self.without_first(param, grad))

    def without_first(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """Return zeros for the first gradient of a parameter since a step, and later gradients unchanged."""
        if param in self.seen:
            return grad
        self.seen.add(param)
        return torch.zeros_like(grad)

    def step(self) -> None:
        self.base.step()
        if self.size > 1:
            self.seen.clear()


@mutant(
    FaultKind.OPTIMIZER,
    on_steps("training.optimizer_options", "sgd_rate_rises_from_0", Part.OPTIMIZER),
    on_steps("training.free_running", "", Part.OPTIMIZER, model="mlp_routed"),
    origin=Origin.MESH,
)
class StepsExpertsByTheFirstRate(KnowsItsExperts):
    """Keeps the first learning rate for experts, while the schedule advances for the other layers."""

    def step(self) -> None:
        groups = seams_engines.deepspeed_optimizer(self.base).param_groups
        of_experts = [group for group in groups if any(param is own for param in group["params"] for own in self.own)]
        if not hasattr(self, "first_rates"):
            self.first_rates = [group["lr"] for group in of_experts]
        for group, rate in zip(of_experts, self.first_rates, strict=True):
            group["lr"] = rate
        self.base.step()


def on_overflow(variant: str, parameter: str) -> Target:
    """Return a target of the law mesh.expert_not_finite."""
    return on_steps("mesh.expert_not_finite", variant, Part.OPTIMIZER, parameter, model="routed")


class KnowsItsOverflow(KnowsItsExperts):
    """The base class of mutants that decide by the gradients of this rank's experts."""

    def own_is_finite(self) -> bool:
        """Return whether all gradients of this rank's experts are finite."""
        return all(bool(param.grad.isfinite().all()) for param in self.own if param.grad is not None)


@mutant(FaultKind.RANKS, on_overflow("inf", "moe.experts.2.*"), origin=Origin.MESH)
class LeavesOutExpertsThatOverflow(KnowsItsOverflow):
    """Leaves all experts of a rank out of a step if one of them overflows, and updates all other weights."""

    def step(self) -> None:
        for param in () if self.own_is_finite() else self.own:
            param.grad = None
        self.base.step()


@mutant(FaultKind.RANKS, on_overflow("nan", "outcome"), origin=Origin.MESH)
class RaisesWhereAnExpertOverflows(KnowsItsOverflow):
    """Makes the step on all ranks, and then raises on the rank whose expert overflows."""

    def step(self) -> None:
        is_finite = self.own_is_finite()
        self.base.step()
        if not is_finite:
            raise FloatingPointError("a gradient of an expert is not finite")


@mutant(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, "random_routed", "adamw", "bf16", parameter=EXPERTS, mesh="ep2"),
    origin=Origin.MESH,
)
class LoadsRoundedMastersOfExperts(ExpertsWrapper):
    """In bf16, rounds the fp32 masters of experts, but no other masters, in a load, as if it copied the weights."""

    stages = (1, 2)

    def load(self, path: Path) -> None:
        self.base.load(path)
        seams_engines.round_expert_masters(self.base)
