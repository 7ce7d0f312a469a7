"""Mutants that return a wrong step count, or the optimizer's own tensor of a step count, to the caller."""

from __future__ import annotations

from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def step_count_target(variant: str = "") -> Target:
    """Return the target in a variant of access.step_count."""
    return Target("access.step_count", Part.OPTIMIZER, model="similar", variant=variant, parameter="*/step")


@mutant(FaultKind.OPTIMIZER, step_count_target(), origin=Origin.BLIND_11)
class ReadsTheLiveStepCount(EngineWrapper):
    """If the caller reads a step count, returns the optimizer's own tensor."""

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        if key == "step":
            own: Tensor = self.optimizer.state[seams.leaves(self.base)[name]][key]
            return own
        value: Tensor | None = self.base.read_optimizer_state(name, key)
        return value


@mutant(FaultKind.OPTIMIZER, step_count_target("idle"), origin=Origin.BLIND_11)
class ReadsTheStepsOfTheEngine(EngineWrapper):
    """If the caller reads a step count, returns the number of all steps, including steps that left the weight idle."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.steps = 0

    def step(self) -> None:
        self.base.step()
        self.steps += 1

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        value: Tensor | None = self.base.read_optimizer_state(name, key)
        return value if value is None or key != "step" else value.new_full((), self.steps)
