"""Mutants that are wrong if a folder is saved or loaded twice, or after a write, a skipped step or a failed load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def one_folder(variant: str, part: Part = Part.GATHER) -> Target:
    """Return the target in a variant of state.one_folder."""
    return Target("state.one_folder", part, variant=variant)


@mutant(FaultKind.STATE, one_folder("edited_between"), origin=Origin.BLIND_11)
class SavesOncePerStep(EngineWrapper):
    """Does not save into a folder if the engine saved into it before, after the same number of steps."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.steps, self.saved = 0, set[tuple[Path, int]]()

    def step(self) -> None:
        self.base.step()
        self.steps += 1

    def save(self, path: Path) -> None:
        if (path, self.steps) not in self.saved:
            self.base.save(path)
        self.saved.add((path, self.steps))


@mutant(FaultKind.STATE, one_folder("loaded_between"), origin=Origin.BLIND_11)
class LoadsTheFirstAgain(EngineWrapper):
    """Restores at a second load of a folder the weights that the first load of the folder found."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.found: dict[Path, dict[str, Tensor]] = {}

    @torch.no_grad()
    def load(self, path: Path) -> None:
        self.base.load(path)
        found = self.found.setdefault(path, self.base.full_params())
        with self.base.gathered(list(found)) as weights:
            for name, weight in found.items():
                weights[name].copy_(weight)


@mutant(FaultKind.STATE, one_folder("written_between"), origin=Origin.BLIND_11)
class SavesWeightsFromBeforeAWrite(EngineWrapper):
    """Saves the old value of each weight that the caller replaced since the last step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before: dict[str, Tensor] = {}

    def write_param(self, name: str, value: Tensor) -> None:
        self.before.setdefault(name, self.base.read_param(name))
        self.base.write_param(name, value)

    def step(self) -> None:
        self.before.clear()
        self.base.step()

    def save(self, path: Path) -> None:
        written = {name: self.base.read_param(name) for name in self.before}
        for name, value in self.before.items():
            self.base.write_param(name, value)
        self.base.save(path)
        for name, value in written.items():
            self.base.write_param(name, value)


@mutant(
    FaultKind.STATE,
    Target("access.after_change", Part.OPTIMIZER, model="similar", variant="written_state_loaded"),
    origin=Origin.BLIND_11,
)
class WritesStateOnceOnly(EngineWrapper):
    """After a load, does not replace an entry of optimizer state that was replaced before the load."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.written, self.refused = set[tuple[str, str]](), set[tuple[str, str]]()

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self.written.add((name, key))
        if (name, key) not in self.refused:
            self.base.write_optimizer_state(name, key, value)

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.refused |= self.written


@mutant(
    FaultKind.STALE,
    Target("values.idle_after_skipped", Part.OPTIMIZER, model="experts", dtype="bf16", parameter="experts.1.*"),
    origin=Origin.BLIND_11,
)
class KeepsGradientsOfASkippedStep(EngineWrapper):
    """After a skipped step, steps idle weights with the finite gradients that the skipped step had."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def step(self) -> None:
        grads, skipped = self.base.full_grads(), self.base.observe().skipped_steps
        for name, grad in self.kept.items():
            if name not in grads:
                self.base.write_grad(name, grad)
        self.base.step()
        was_skipped = self.base.observe().skipped_steps > skipped
        self.kept = {name: grad for name, grad in grads.items() if was_skipped and bool(grad.isfinite().all())}


@mutant(
    FaultKind.AUTOCAST,
    Target("state.refuse_missing", Part.GATHER, variant="absent", dtype="bf16", parameter="default dtype"),
    origin=Origin.BLIND_11,
)
class FailedLoadKeepsTheDtype(EngineWrapper):
    """Leaves the dtype of the weights as torch's default dtype after a load that raises."""

    def load(self, path: Path) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[self.config.dtype])
        self.base.load(path)
        torch.set_default_dtype(before)
