"""Mutants that break rules which DeepSpeed adds to a dynamic loss scale: hysteresis and a minimum."""

from __future__ import annotations

from typing import Any

from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part

PATIENCE = "patience"  # the key of the number of overflows that the loss scale still ignores, in its state


def scaler_target(variant: str) -> Target:
    """Return the target in a variant of precision.grad_scaler."""
    return Target("precision.grad_scaler", Part.OPTIMIZER, model="mixed", variant=variant, parameter="loss")


class ScalerWrapper(EngineWrapper):
    """The base class of mutants that change the state of the loss scale after a step."""

    def step(self) -> None:
        scaler = seams.loss_scaler(self.base)
        before = scaler.state_dict()
        self.base.step()
        scaler.load_state_dict(self.change_state(before, scaler.state_dict()))

    def change_state(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Return the state that replaces ``after``, which is the state of the loss scale after the step."""
        raise NotImplementedError


@mutant(FaultKind.LOSS_SCALE, scaler_target("hysteresis_resumed"), origin=Origin.BLIND_11)
class LoadRestoresPatience(SpoiledLoad):
    """Resets, in a load, the number of overflows that the loss scale still ignores to its value at construction."""

    def spoil(self) -> None:
        scaler = seams.loss_scaler(self.base)
        hysteresis = int(self.config.options.get("fp16", {}).get("hysteresis", 1))
        scaler.load_state_dict({**scaler.state_dict(), PATIENCE: hysteresis})


@mutant(FaultKind.LOSS_SCALE, scaler_target("consecutive_hysteresis"), origin=Origin.BLIND_11)
class GoodStepsLeavePatience(ScalerWrapper):
    """With ``consecutive_hysteresis``, does not restore the number of ignored overflows in a step without overflow."""

    def change_state(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {**after, PATIENCE: min(before[PATIENCE], after[PATIENCE])}


@mutant(FaultKind.LOSS_SCALE, scaler_target("minimum"), origin=Origin.BLIND_11)
class HalvesBelowTheMinimum(ScalerWrapper):
    """Halves the loss scale at an overflow even if the new scale is less than ``min_loss_scale``."""

    def change_state(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {**after, "scale": before["scale"] / 2} if after["scale"] < before["scale"] else after
