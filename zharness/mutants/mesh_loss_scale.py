"""Define mutants in which a rank of a mesh has a loss scale, or skips a step, of its own."""

from __future__ import annotations

from torch import nn

from zharness.engines import EngineConfig
from zharness.mesh import CONTEXT, EXPERT
from zharness.mutants import seams, seams_engines
from zharness.mutants.mesh import REP2, on_mesh
from zharness.mutants.mesh_copies import OverCopies
from zharness.mutants.mesh_deepspeed_copies import OverLastRank
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_scale(mesh: str, model: str, parameter: str = "loss scale") -> Target:
    """Return a target on two ranks of the law of the loss scale."""
    return Target("mesh.loss_scale", Part.OPTIMIZER, model, "autocast", parameter=parameter, mesh=mesh)


class KeepsItsScale(OverLastRank):
    """The base class of mutants whose last rank of an axis halves its loss scale after each step, alone."""

    stages = (1, 2)

    def step(self) -> None:
        self.right.step()
        scaler = seams_engines.autocast_scaler(self.right)
        if self.is_last and scaler is not None:
            scaler.update(scaler.get_scale() / 2)


@mutant(FaultKind.LOSS_SCALE, on_scale("tp2", "mixed_exact"), origin=Origin.MESH)
class HalvesTheScaleOfATensorRank(KeepsItsScale):
    """The last rank of tp halves its loss scale after each step, and no other rank does."""


@mutant(FaultKind.LOSS_SCALE, on_scale("cp2", "mixed_context"), origin=Origin.MESH)
class HalvesTheScaleOfASequenceRank(KeepsItsScale):
    """The last rank of a sequence halves its loss scale after each step, and no other rank does."""

    axis = CONTEXT


@mutant(FaultKind.LOSS_SCALE, on_scale("ep2", "mixed_routed"), origin=Origin.MESH)
class HalvesTheScaleOfAnExpertRank(KeepsItsScale):
    """The last rank of the experts halves its loss scale after each step, and no other rank does."""

    axis = EXPERT


@mutant(FaultKind.RANKS, on_scale("cp2", "mixed_context", parameter="*"), origin=Origin.MESH)
class SkipsTheStepAfterAnOverflow(OverLastRank):
    """The last rank of a sequence makes the step after one that overflowed with gradients of zero, alone."""

    stages = (0,)
    axis = CONTEXT

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.overflowed = False

    def step(self) -> None:
        grads = [param.grad for param in self.trained() if param.grad is not None]
        is_left_out = self.is_last and self.overflowed
        self.overflowed = not all(bool(grad.isfinite().all()) for grad in grads)
        for grad in grads if is_left_out else ():
            grad.zero_()
        self.right.step()


@mutant(
    FaultKind.LOSS_SCALE,
    on_mesh("mesh.loss_scale", Part.OPTIMIZER, "mixed", REP2, parameter="loss scale", variant="fp16"),
    origin=Origin.MESH,
)
class HalvesTheScaleOfACopy(OverCopies):
    """The last copy halves its loss scale after each step, and no other copy does."""

    def step(self) -> None:
        self.right.step()
        if self.copies > 1 and self.copy == self.copies - 1:
            scaler = seams.loss_scaler(self.right)
            scaler.load_state_dict({**scaler.state_dict(), "scale": scaler.value / 2})
