"""Define mutants in which some ranks of a mesh have another loss scale, or skip another step, than the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import CONTEXT, EXPERT, TENSOR
from zharness.mutants import seams, seams_engines
from zharness.mutants.mesh import REP2, on_mesh
from zharness.mutants.mesh_copies import CopiesWrapper
from zharness.mutants.mesh_deepspeed_copies import LastRankWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_scale(mesh: str, model: str, parameter: str = "loss scale") -> Target:
    """Return a target of the law mesh.loss_scale on two ranks."""
    return Target("mesh.loss_scale", Part.OPTIMIZER, model, "autocast", parameter=parameter, mesh=mesh)


def on_overflow(mesh: str, model: str) -> Target:
    """Return a target of the law mesh.loss_scale on two ranks, whose cause names the axis along which weights moved."""
    cause = f"a step with an overflow changed it, on some of the ranks along {mesh[:2]} alone"
    return replace(on_scale(mesh, model, "*"), cause=cause)


class KeepsItsScale(LastRankWrapper):
    """The base class of mutants that halve the loss scale after each step only on the last rank of an axis."""

    stages = (1, 2)

    def step(self) -> None:
        self.base.step()
        scaler = seams_engines.autocast_scaler(self.base)
        if self.is_last and scaler is not None:
            scaler.update(scaler.get_scale() / 2)


@mutant(FaultKind.LOSS_SCALE, on_scale("tp2", "mixed_exact"), origin=Origin.MESH)
class HalvesTheScaleOfATensorRank(KeepsItsScale):
    """Halves the loss scale after each step only on the last rank of tp."""


@mutant(FaultKind.LOSS_SCALE, on_scale("cp2", "mixed_context"), origin=Origin.MESH)
class HalvesTheScaleOfASequenceRank(KeepsItsScale):
    """Halves the loss scale after each step only on the last rank of a sequence."""

    axis = CONTEXT


@mutant(FaultKind.LOSS_SCALE, on_scale("ep2", "mixed_routed"), origin=Origin.MESH)
class HalvesTheScaleOfAnExpertRank(KeepsItsScale):
    """Halves the loss scale after each step only on the last rank of the experts."""

    axis = EXPERT


@mutant(FaultKind.RANKS, on_scale("cp2", "mixed_context", parameter="*"), origin=Origin.MESH)
class SkipsTheStepAfterAnOverflow(LastRankWrapper):
    """On the last rank of a sequence only, zeroes the gradients in the step after a step that overflowed."""

    stages = (0,)
    axis = CONTEXT

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.overflowed = False

    def step(self) -> None:
        grads = [param.grad for param in self.parameters_with_grad() if param.grad is not None]
        is_left_out = self.is_last and self.overflowed
        self.overflowed = not all(bool(grad.isfinite().all()) for grad in grads)
        for grad in grads if is_left_out else ():
            grad.zero_()
        self.base.step()


class StepsThroughAnOverflow(LastRankWrapper):
    """The base class of mutants that step through an overflow on all ranks of an axis but the last one.

    These ranks update the weights that all ranks of the axis have by the gradients, with zeros for infinite elements.
    The loss scale is that of a skipped step on every rank.
    """

    stages = (1, 2)

    def step(self) -> None:
        grads: dict[str, Tensor] = self.base.full_grads() if self.split else {}
        self.base.step()
        if all(bool(grad.isfinite().all()) for grad in grads.values()) or self.skips(grads):
            return
        with torch.no_grad():
            for name, param in self.copied():
                if name in grads:  # a frozen parameter has no gradient
                    param.sub_(grads[name].nan_to_num(0.0, 0.0, 0.0))

    def skips(self, grads: Mapping[str, Tensor]) -> bool:
        """Return whether this rank skips a step with an overflow."""
        return self.is_last


@mutant(FaultKind.LOSS_SCALE, on_overflow("tp2", "mixed_exact"), origin=Origin.MESH)
class StepsThroughAnOverflowOfATensorRank(StepsThroughAnOverflow):
    """If a gradient overflows, skips the step on the last rank of tp only; the other ranks make the step."""


@mutant(
    FaultKind.LOSS_SCALE,
    replace(on_scale("tp2", "mixed_exact", "*"), cause="a step with an overflow changed it"),
    origin=Origin.MESH,
)
class AsksTheLastTensorRankForAnOverflow(StepsThroughAnOverflow):
    """Skips a step on tp if the last rank's part of the first layer overflows, but not if only another part does."""

    def skips(self, grads: Mapping[str, Tensor]) -> bool:
        last = grads["first.weight"].chunk(self.config.mesh.size(TENSOR))[-1]
        return not bool(last.isfinite().all())


@mutant(FaultKind.LOSS_SCALE, on_overflow("cp2", "mixed_context"), origin=Origin.MESH)
class StepsThroughAnOverflowOfASequenceRank(StepsThroughAnOverflow):
    """If a gradient overflows, skips the step on the last rank of a sequence only; the other ranks make the step."""

    axis = CONTEXT


@mutant(FaultKind.LOSS_SCALE, on_overflow("ep2", "mixed_routed"), origin=Origin.MESH)
class StepsThroughAnOverflowOfAnExpertRank(StepsThroughAnOverflow):
    """If an expert overflows, skips the step on the last rank of the experts only; the other ranks make the step."""

    axis = EXPERT


@mutant(
    FaultKind.SHARDS,
    replace(
        on_scale("cp2", "mixed_context", "finiteness of gradients"),
        part=Part.REDUCTION,
        cause="on some of the ranks along cp alone",
    ),
    origin=Origin.MESH,
)
class HidesAnOverflowFromASequenceRank(LastRankWrapper):
    """Returns zeros for the infinite elements of gradients on the last rank of a sequence only."""

    axis = CONTEXT

    def full_grads(self) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = self.base.full_grads()
        return {name: grad.nan_to_num(0.0, 0.0, 0.0) for name, grad in grads.items()} if self.is_last else grads


def on_copy(parameter: str, cause: str = "") -> Target:
    """Return a target of the law mesh.loss_scale on two copies, in fp16."""
    return on_mesh("mesh.loss_scale", Part.OPTIMIZER, "mixed", REP2, parameter=parameter, variant="fp16", cause=cause)


@mutant(
    FaultKind.LOSS_SCALE,
    on_copy("*", "a step with an overflow changed it, on some of the ranks along dp_replicate alone"),
    origin=Origin.MESH,
)
class StepsThroughAnOverflowOfACopy(CopiesWrapper):
    """If a gradient overflows, skips the step on the last copy only; the other copies make the step."""

    def spoil(self) -> None:
        updates: list[Callable[[Mapping[str, Tensor]], None]] = []

        def keep(original: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
            updates.append(original)
            return original

        def step_through(original: Callable[..., bool]) -> Callable[..., bool]:
            def clip(grads: dict[str, Tensor]) -> bool:
                is_finite = original(grads)
                if not is_finite and self.copy < self.copies - 1:
                    updates[0]({name: grad.nan_to_num(0.0, 0.0, 0.0) for name, grad in grads.items()})
                return is_finite

            return clip

        seams.wrap_update(self.base, keep)
        seams.wrap_unscale_and_clip(self.base, step_through)


@mutant(
    FaultKind.LOSS_SCALE,
    on_copy("loss scale"),
    origin=Origin.MESH,
)
class HalvesTheScaleOfACopy(CopiesWrapper):
    """Halves the loss scale after each step only on the last copy."""

    def step(self) -> None:
        self.base.step()
        if self.copies > 1 and self.copy == self.copies - 1:
            scaler = seams.loss_scaler(self.base)
            scaler.load_state_dict({**scaler.state_dict(), "scale": scaler.value / 2})
