"""Mutants that share state with the other engines of the process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from zharness.engines import AccumulationOwner, EngineConfig, Reduction
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import ClosesOverOthers, EngineWrapper
from zharness.parity import Part


def in_turns(variant: str, part: Part | None = Part.OPTIMIZER, dtype: str = "fp32") -> Target:
    """Return the target in a variant of engines.interleaved."""
    return Target("engines.interleaved", part, variant=variant, dtype=dtype)


@mutant(FaultKind.CONTRIBUTION, in_turns("windows", Part.REDUCTION), origin=Origin.BLIND_7)
class CountsWindowsTogether(EngineWrapper):
    """Drops gradients before the first micro-batch of a window, counting the micro-batches of all engines."""

    counted: ClassVar[dict[str, int]] = {"micro-batches": 0}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        counts_micro_batches = self.config.accumulation_owner is AccumulationOwner.ENGINE
        if counts_micro_batches and self.counted["micro-batches"] % self.config.accumulation_steps == 0:
            for parameter in self.parameters_with_grad():
                parameter.grad = None
            self.base.zero_grad()
        self.counted["micro-batches"] += 1
        self.base.backward(loss, retain_graph=retain_graph)


@mutant(FaultKind.CLIPPING, in_turns("clipped"), origin=Origin.BLIND_7)
class ReportsTheNormOfAnother(EngineWrapper):
    """Reports the norm of the engine that made the last step in the process."""

    norms: ClassVar[list[float | None]] = []

    def step(self) -> None:
        self.base.step()
        self.norms[:] = [self.base.grad_norm()]

    def grad_norm(self) -> float | None:
        return self.norms[0] if self.norms and self.base.grad_norm() is not None else self.base.grad_norm()


@mutant(FaultKind.OPTIMIZER, in_turns("optimizers"), origin=Origin.BLIND_7)
class ClearsTheStateOfOthers(ClosesOverOthers):
    """Clears the optimizer state of every other engine of the process in ``close``."""

    alive: ClassVar[list[EngineWrapper]] = []

    def change_other(self, engine: EngineWrapper) -> None:
        seams_engines.optimizer(engine.base).state.clear()


@mutant(FaultKind.SCALE, in_turns("reductions", Part.REDUCTION), origin=Origin.CIRCUMSTANCES)
class ReducesLikeTheNewest(EngineWrapper):
    """Sums gradients over ranks instead of averaging them if the engine that was built last sums its gradients."""

    newest: ClassVar[list[Reduction]] = []

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.newest[:] = [config.reduction]
        self.averages = config.reduction is Reduction.MEAN

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        sums = self.averages and self.newest == [Reduction.SUM]
        self.base.backward(2 * loss if sums else loss, retain_graph=retain_graph)


@mutant(FaultKind.STATE, in_turns("checkpoints", Part.REDUCTION), origin=Origin.CIRCUMSTANCES)
class LoadsTheLastCheckpoint(EngineWrapper):
    """Loads the checkpoint that any engine of the process saved last."""

    saved: ClassVar[list[Path]] = []

    def save(self, path: Path) -> None:
        self.base.save(path)
        self.saved[:] = [path]

    def load(self, path: Path) -> None:
        latest = self.saved[0] if self.saved and self.saved[0].exists() else path
        self.base.load(latest)


@mutant(FaultKind.LOSS_SCALE, in_turns("clipped", Part.REDUCTION, "fp16"), origin=Origin.CIRCUMSTANCES)
class ScalesLikeTheNewest(EngineWrapper):
    """Multiplies losses by the loss scale of the engine that was built last."""

    newest: ClassVar[list[float]] = []

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.newest[:] = [config.loss_scale]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * (self.newest[0] / self.config.loss_scale), retain_graph=retain_graph)
