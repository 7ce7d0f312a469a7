"""Engines that save or load wrongly, each a few lines around the right one."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suites.meta.broken import Around, Factory
from zharness.engines import Capabilities, EngineConfig, Feature

CLAIMS = Capabilities(
    stages=frozenset({0, 3}),
    refuses={Feature.NO_SYNC: "the reference engine, which is right, has none at stage 3"},
)


class Keeper(Around):
    """A right engine that claims checkpoints."""

    capabilities = CLAIMS

    @property
    def optimizer(self) -> Any:
        return self.right.engine.optimizer  # type: ignore[attr-defined]

    def load(self, path: Path) -> None:
        self.right.load(path)
        self.spoil()

    def load_universal(self, path: Path) -> None:
        self.right.load_universal(path)  # type: ignore[attr-defined]
        self.spoil()

    def spoil(self) -> None:
        """What goes wrong in loading."""


class DropsMoments(Keeper):
    """Resumes the weights and the counts, and starts the moments anew."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    value.zero_()


class RestartsCounts(Keeper):
    """Counts steps from 0 again, so that Adam corrects for a bias that is gone."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            state["step"].zero_()


class RestartsSchedule(Keeper):
    """Goes back to the learning rate of the first step."""

    def spoil(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


class SwapsMoments(Keeper):
    """Takes the first moment for the second."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


class SlipsShards(Keeper):
    """Where parameters are sharded, each element is read into its neighbour's place."""

    def spoil(self) -> None:
        if self.config.stage == 3:
            parameters = self.right.engine._parameters  # type: ignore[attr-defined]
            with torch.no_grad():
                for leaf in parameters.leaves.values():
                    leaf.copy_(leaf.roll(1))
            parameters.publish(parameters.leaves)


class LoadsHalf(Keeper):
    """Has changed the weights by the time it finds that a piece is missing."""

    def load_universal(self, path: Path) -> None:
        try:
            self.right.load_universal(path)  # type: ignore[attr-defined]
        finally:
            with torch.no_grad():
                next(iter(self.module.parameters())).add_(1.0)


class PassesOverDamage(Keeper):
    """Says nothing of a piece that is missing."""

    def load_universal(self, path: Path) -> None:
        with suppress(Exception):
            self.right.load_universal(path)  # type: ignore[attr-defined]


class Unpickles(Keeper):
    """Reads what it is given with plain pickle before it looks at it."""

    def load(self, path: Path) -> None:
        for file in path.rglob("*"):
            with suppress(Exception), file.open("rb") as stream:
                pickle.load(stream)  # noqa: S301 - the fault
        self.right.load(path)


class Unties(Keeper):
    """Its full state dict has a tensor of its own for each name of a tied weight."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full = self.right.full_state_dict()  # type: ignore[attr-defined]
        return {name: tensor.clone() for name, tensor in full.items()}


class SavesOldWeights(Keeper):
    """Its full state dict is the one of before training."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.old = self.right.full_state_dict()  # type: ignore[attr-defined]

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.old


drops_moments: Factory = DropsMoments
restarts_counts: Factory = RestartsCounts
restarts_schedule: Factory = RestartsSchedule
swaps_moments: Factory = SwapsMoments
slips_shards: Factory = SlipsShards
loads_half: Factory = LoadsHalf
passes_over_damage: Factory = PassesOverDamage
unpickles: Factory = Unpickles
unties: Factory = Unties
saves_old_weights: Factory = SavesOldWeights
