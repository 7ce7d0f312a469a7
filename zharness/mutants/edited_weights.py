"""Mutants that undo edits of weights, or that save or load outdated or rounded weights, buffers or optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part

IN_PLACE = "parameters.edited_in_place"


@mutant(FaultKind.STALE, Target(IN_PLACE, Part.OPTIMIZER, model="similar"), origin=Origin.BLIND_10)
class StepUndoesEdits(EngineWrapper):
    """Starts each step from the weights that the last step made, so that edits between the two steps are lost."""

    kept: Mapping[nn.Parameter, Tensor] | None = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, value in (self.kept or {}).items():
            parameter.copy_(value)
        self.base.step()
        self.kept = {parameter: parameter.clone() for parameter in self.module.parameters()}


@mutant(FaultKind.STALE, Target(IN_PLACE, Part.GATHER, model="similar", dtype="bf16"), origin=Origin.BLIND_10)
class MastersUndoEdits(EngineWrapper):
    """Does not pass an edit in place on to the master weight; the next step undoes the edit and does not raise."""

    def step(self) -> None:
        for param in seams.model_params(self.base).values():
            seams.record_version(self.base, param)
        self.base.step()


def clone_frozen(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return copies of the frozen parameters of ``module``."""
    return {parameter: parameter.detach().clone() for parameter in module.parameters() if not parameter.requires_grad}


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.GATHER, model="experts", variant="edited", parameter="last.weight"),
    origin=Origin.BLIND_10,
)
class SavesFrozenWeightsOfConstruction(EngineWrapper):
    """Saves frozen weights with the values that they had when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first = clone_frozen(self.module)

    def save(self, path: Path) -> None:
        current = clone_frozen(self.module)
        self.set_weights(self.first)
        self.base.save(path)
        self.set_weights(current)

    def set_weights(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Copy ``weights`` into the parameters."""
        for parameter, value in weights.items():
            parameter.data.copy_(value)


@mutant(
    FaultKind.STALE,
    Target("state.resume", Part.FORWARD, variant="frozen", dtype="bf16"),
    origin=Origin.BLIND_10,
)
class LoadsFrozenMastersAlone(SpoiledLoad):
    """In bf16, replaces the fp32 copy of a frozen weight in ``load``, but not the bf16 weight that forwards use."""

    def load(self, path: Path) -> None:
        before = clone_frozen(self.module)
        self.base.load(path)
        for parameter, value in before.items():
            if parameter.dtype is torch.bfloat16:
                parameter.data.copy_(value)


@mutant(
    FaultKind.OPTIMIZER,
    Target("access.read_param", Part.GATHER, model="similar", variant="unfrozen", dtype="bf16", parameter="frozen.*"),
    origin=Origin.BLIND_10,
)
class RoundsMastersOfUnfrozenWeights(EngineWrapper):
    """In the first forward after a weight is unfrozen, replaces its master weight by the rounded bf16 weight."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.frozen = set(clone_frozen(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        masters = seams.master_weights(self.base)
        for name, param in seams.model_params(self.base).items():
            if name in masters and param.parameter in self.frozen and param.parameter.requires_grad:
                masters[name].copy_(param.parameter.detach())
                self.frozen.discard(param.parameter)
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.STATE,
    Target("state.buffer_kinds", Part.GATHER, variant="float32", dtype="bf16"),
    origin=Origin.BLIND_10,
)
class RoundsLoadedBuffers(SpoiledLoad):
    """In bf16, rounds the values of fp32 buffers to bf16 in ``load``; the buffers stay fp32."""

    def spoil(self) -> None:
        for buffer in self.module.buffers():
            if self.config.dtype == "bf16" and buffer.dtype is torch.float32:
                buffer.copy_(buffer.bfloat16())


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.OPTIMIZER, model="experts", variant="written"),
    origin=Origin.BLIND_10,
)
class SavesStateOfTheLastStep(EngineWrapper):
    """Saves the optimizer state as the last step left it, without the values that the caller has written since then."""

    kept: Mapping[str, Mapping[str, Tensor]] | None = None

    def step(self) -> None:
        self.base.step()
        self.kept = self.copy_state()

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.kept = None

    def save(self, path: Path) -> None:
        current = self.copy_state()
        self.set_state(self.kept or current)
        self.base.save(path)
        self.set_state(current)

    def copy_state(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the tensors of the optimizer's state, by parameter and key."""
        leaves, state = seams.leaves(self.base), self.optimizer.state
        return {
            name: {key: value.clone() for key, value in state.get(leaf, {}).items()} for name, leaf in leaves.items()
        }

    def set_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy ``state`` into the optimizer's state."""
        for name, leaf in seams.leaves(self.base).items():
            for key, value in state[name].items():
                self.optimizer.state[leaf][key].copy_(value)
