"""Engines that save or load wrongly."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target
from zharness.parity import Part


class Spoiled(Around):
    """Loads, and then spoils what it loaded."""

    def load(self, path: Path) -> None:
        self.right.load(path)
        self.spoil()

    def load_universal(self, path: Path) -> None:
        self.right.load_universal(path)
        self.spoil()

    def spoil(self) -> None:
        """What goes wrong in loading."""


class DropsMoments(Spoiled):
    """Resumes the weights and the counts, and starts the moments anew."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    value.zero_()


class RestartsCounts(Spoiled):
    """Counts steps from 0 again, so that Adam corrects for a bias that is gone."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


class MakesUpState(Spoiled):
    """Gives moments of zero to a parameter of which the checkpoint has none, as it had no gradient yet."""

    def spoil(self) -> None:
        for group in self.optimizer.param_groups:
            for leaf in group["params"]:
                if leaf not in self.optimizer.state:
                    zeros = {key: torch.zeros_like(leaf) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[leaf] = {"step": torch.zeros(()), **zeros}


class RestartsTheSchedule(Spoiled):
    """Goes back to the learning rate of the first step."""

    def spoil(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


class SwapsMoments(Spoiled):
    """Takes the first moment for the second."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


class SlipsShards(Spoiled):
    """Where parameters are sharded, each element is read into its neighbour's place."""

    stages = (0, 3)

    def spoil(self) -> None:
        if self.config.stage == 3:
            parameters = self.right.engine._parameters
            with torch.no_grad():
                for leaf in parameters.leaves.values():
                    leaf.copy_(leaf.roll(1))
            parameters.publish(parameters.leaves)


class LosesItsMasters(Spoiled):
    """Makes the masters anew from the rounded weights."""

    def spoil(self) -> None:
        for master in self.right.engine._parameters.masters.values():
            master.copy_(master.bfloat16())


class LoadsHalf(Around):
    """Has changed the weights by the time it finds that a piece is missing."""

    def load_universal(self, path: Path) -> None:
        try:
            self.right.load_universal(path)
        finally:
            with torch.no_grad():
                next(iter(self.module.parameters())).add_(1.0)


class PassesOverDamage(Around):
    """Says nothing of a piece that is missing."""

    def load_universal(self, path: Path) -> None:
        with suppress(Exception):
            self.right.load_universal(path)


class Unpickles(Around):
    """Reads what it is given with plain pickle before it looks at it."""

    def load(self, path: Path) -> None:
        for file in path.rglob("*"):
            with suppress(Exception), file.open("rb") as stream:
                pickle.load(stream)  # noqa: S301 - the fault
        self.right.load(path)


class Unties(Around):
    """Its full state dict has a tensor of its own for each name of a tied weight."""

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.right.full_state_dict().items()}


class SavesOldWeights(Around):
    """Its full state dict is the one of before training."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.old: dict[str, Tensor] = self.right.full_state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.old


OPTIMIZER, GATHER = Part.OPTIMIZER, Part.GATHER


def state(check: str, part: Part, variant: str = "", model: str = "mlp", parameter: str = "*") -> Target:
    """A target among the laws of saved state."""
    return Target(f"state.{check}", part, model, variant, parameter=parameter)


MUTANTS = (
    Mutant(
        DropsMoments,
        Kind.STATE,
        (
            state("resume", OPTIMIZER, "adamw", parameter="*/exp_avg*"),
            state("resume", OPTIMIZER, "sgd", parameter="*/momentum_buffer"),
        ),
    ),
    Mutant(RestartsCounts, Kind.STATE, (state("resume", OPTIMIZER, "adamw", parameter="*/step"),)),
    Mutant(MakesUpState, Kind.STATE, (Target("state.resume", None, variant="idle", words="unknown ['idle/exp_avg'"),)),
    Mutant(
        RestartsTheSchedule,
        Kind.STATE,
        (state("resume", OPTIMIZER, "sgd"), state("universal", OPTIMIZER, "flat")),
    ),
    Mutant(SlipsShards, Kind.STATE, (state("reshard", GATHER),)),
    Mutant(SwapsMoments, Kind.STATE, (state("universal", OPTIMIZER, "shaped"),)),
    Mutant(LosesItsMasters, Kind.STATE, (Target("state.resume", OPTIMIZER, variant="adamw", dtype="bf16"),)),
    Mutant(LoadsHalf, Kind.STATE, (state("universal", GATHER, "shaped"),)),
    Mutant(PassesOverDamage, Kind.STATE, (state("universal", GATHER, "flat"),)),
    Mutant(Unpickles, Kind.STATE, (state("refuse_pickle", GATHER),)),
    Mutant(Unties, Kind.STATE, (state("consolidate", GATHER, model="transformer"),)),
    Mutant(SavesOldWeights, Kind.STATE, (state("consolidate", GATHER, model="transformer"),)),
)
