"""Define mutants that exchange, copy or lose one of the two stages of a rank in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import PipelineWrapper
from zharness.mutants.pipeline_state import on_other_stages
from zharness.parity import Part


def on_two_stages(variant: str, parameter: str = "blocks.*", part: Part = Part.GATHER) -> Target:
    """Return a target of the law pipeline.other_mesh on two ranks with two stages each."""
    return replace(on_other_stages(variant, parameter=parameter), world_size=2, part=part)


class TwoStagesWrapper(PipelineWrapper):
    """The base class of mutants that are broken under one schedule, which gives each rank two stages."""

    schedule: ClassVar[str] = "zbv"

    @property
    def is_broken(self) -> bool:
        """Whether the engine runs the schedule under which the mutant is broken."""
        return self.config.options.get("schedule") == self.schedule


class ExchangesModules(TwoStagesWrapper):
    """The base class of mutants that save modules under other modules' names, and exchange the names back at load.

    An engine with the same schedule therefore loads right values. ``others`` maps each exchanged module to the other.
    """

    others: ClassVar[Mapping[str, str]] = {}

    def save(self, path: Path) -> None:
        self.exchange()
        self.base.save(path)
        self.exchange()

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.exchange()

    def exchange(self) -> None:
        """Give each weight of an exchanged module the value and the optimizer state of the other module's weight."""
        if not self.is_broken:
            return
        weights, states = self.base.full_params(), self.base.full_optimizer_state()
        with torch.no_grad():
            for name, param in seams_engines.stage_params(self.base).items():
                module, _, rest = name.partition(".linear.")
                other = f"{self.others.get(module, module)}.linear.{rest}"
                param.copy_(weights[other])
                for key, value in self.optimizer.state.get(param, {}).items():
                    value.copy_(states[other][key])


@mutant(
    FaultKind.STATE,
    on_two_stages("to_others_zbv"),
    on_two_stages("from_others_zbv"),
    origin=Origin.MESH,
)
class SavesStagesOfAVUnderEachOthersNames(ExchangesModules):
    """Saves each of the two stages of a rank of a ZBV schedule under the names of the rank's other stage."""

    others: ClassVar[Mapping[str, str]] = {f"blocks.{index}": f"blocks.{3 - index}" for index in range(4)}


@mutant(
    FaultKind.STATE,
    on_two_stages("to_others_interleaved", "blocks.[12].*"),
    on_two_stages("from_others_interleaved", "blocks.[12].*"),
    origin=Origin.MESH,
)
class SavesInterleavedStagesAsNeighbours(ExchangesModules):
    """Saves the two stages of a rank of an interleaved schedule under the names of two adjacent modules."""

    schedule: ClassVar[str] = "interleaved"
    others: ClassVar[Mapping[str, str]] = {"blocks.1": "blocks.2", "blocks.2": "blocks.1"}


@mutant(
    FaultKind.STATE,
    on_two_stages("from_others_zbv", "*/exp_avg"),
    origin=Origin.MESH,
)
class LoadsNoMomentsOfTheSecondStageOfAV(TwoStagesWrapper):
    """Sets Adam's first moments to zeros at load for the second stage of each rank of a ZBV schedule."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        params = list(seams_engines.stage_params(self.base).values())
        for param in params[len(params) // 2 :] if self.is_broken else ():
            self.optimizer.state[param]["exp_avg"].zero_()


@mutant(FaultKind.STATE, on_two_stages("to_others_zbv"), origin=Origin.MESH)
class SavesTheFirstStageOfAVTwice(TwoStagesWrapper):
    """Saves the weights of the first stage of a rank of a ZBV schedule also under the names of its second stage."""

    def save(self, path: Path) -> None:
        params = list(seams_engines.stage_params(self.base).values())
        half = len(params) // 2 if self.is_broken else len(params)
        lost = [param.detach().clone() for param in params[half:]]
        with torch.no_grad():
            for param, first in zip(params[half:], params, strict=False):
                param.copy_(first)
            self.base.save(path)
            for param, value in zip(params[half:], lost, strict=True):
                param.copy_(value)
