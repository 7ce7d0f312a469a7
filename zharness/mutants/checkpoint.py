"""Mutants that save or load a checkpoint wrongly."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(FaultKind.STATE, Target("state.reshard", Part.GATHER), origin=Origin.STATE)
class SlipsShards(SpoiledLoad):
    """Loads each element of a sharded parameter into the position of the next element."""

    stages = (0, 3)

    def spoil(self) -> None:
        if self.config.stage == 3:
            leaves = seams.leaves(self.base)
            with torch.no_grad():
                for leaf in leaves.values():
                    leaf.copy_(leaf.roll(1))
            seams.publish(self.base, leaves)


@mutant(FaultKind.STATE, Target("state.universal", Part.GATHER, variant="shaped"), origin=Origin.STATE)
class LoadsHalf(EngineWrapper):
    """Changes the weights although a part of the checkpoint is missing and the load raises."""

    def load_universal(self, path: Path) -> None:
        try:
            self.base.load_universal(path)
        finally:
            with torch.no_grad():
                next(iter(self.module.parameters())).add_(1.0)


@mutant(FaultKind.STATE, Target("state.universal", Part.GATHER, variant="flat"), origin=Origin.STATE)
class PassesOverDamage(EngineWrapper):
    """Does not raise if a part of the checkpoint is missing."""

    def load_universal(self, path: Path) -> None:
        with suppress(Exception):
            self.base.load_universal(path)


@mutant(FaultKind.STATE, Target("state.refuse_pickle", Part.GATHER), origin=Origin.STATE)
class Unpickles(EngineWrapper):
    """Unpickles every file of a checkpoint before it checks the files."""

    def load(self, path: Path) -> None:
        for file in path.rglob("*"):
            with suppress(Exception), file.open("rb") as stream:
                pickle.load(stream)  # noqa: S301 - the fault
        self.base.load(path)


@mutant(FaultKind.STATE, Target("training.any_order", Part.GATHER, variant="saved"), origin=Origin.ORDERS)
class LoadsTheNewest(EngineWrapper):
    """Loads the last checkpoint that it saved, even if the caller passes another folder."""

    wraps = "ddp"
    newest: Path | None = None

    def save(self, path: Path) -> None:
        self.newest = path
        self.base.save(path)

    def load(self, path: Path) -> None:
        self.base.load(self.newest or path)


@mutant(FaultKind.STATE, Target("training.any_order", Part.GATHER, variant="saved"), origin=Origin.ORDERS)
class KeepsTheFirstCheckpoint(EngineWrapper):
    """Does not save into a folder into which it has saved before."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.saved: set[Path] = set()

    def save(self, path: Path) -> None:
        if path not in self.saved:
            self.base.save(path)
        self.saved.add(path)


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.GATHER, model="experts", variant="float64", parameter="experts.2.*"),
    origin=Origin.STATE,
)
class LoadsFloat64InFloat32(SpoiledLoad):
    """Rounds the float64 weights to float32 when it loads a checkpoint."""

    wraps = "ddp"

    @torch.no_grad()
    def spoil(self) -> None:
        for parameter in self.module.parameters():
            parameter.copy_(parameter.float())


@mutant_factory(
    FaultKind.STATE,
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_5,
    equivalent="plain PyTorch's load_state_dict keeps accumulated gradients, too; only zero_grad drops them",
)
def load_keeps_gradients(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Does not drop the accumulated gradients, or the count of their micro-batches, in ``load``.

    Gradients that were accumulated before the load, with other weights, are added to the first step after the load.
    """
    engine = seams.build(model, config)

    def resume(contents: Any, local_tensors: Mapping[str, Tensor], module_only: bool = False) -> None:
        seams.load_tensors(engine, contents, local_tensors, module_only)
        if not module_only:
            seams.set_step_counts(engine, contents.steps, contents.skipped_steps)

    seams.replace_resume(engine, resume)
    return engine


@mutant(
    FaultKind.STATE,
    Target("state.refuse_missing", Part.GATHER, variant="absent"),
    Target("state.refuse_missing", Part.GATHER, variant="empty"),
    origin=Origin.BLIND_7,
)
class TakesNoCheckpointForAFreshStart(EngineWrapper):
    """Loads nothing, and raises nothing, if the folder of the checkpoint is empty or does not exist."""

    def load(self, path: Path) -> None:
        if path.exists() and any(path.iterdir()):
            self.base.load(path)


@mutant(
    FaultKind.STATE,
    Target("state.refuse_missing", Part.GATHER, variant="absent", parameter="*/step"),
    origin=Origin.BLIND_9,
)
class ClearsTheOptimizerBeforeALoad(EngineWrapper):
    """Clears the optimizer's state before a load, so that the state is lost even if the load then raises."""

    def load(self, path: Path) -> None:
        self.optimizer.state.clear()
        self.base.load(path)
