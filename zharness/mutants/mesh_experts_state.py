"""Define mutants that break experts in other losses, in buffers and in saved state. The mutants need DeepSpeed."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part
from zharness.workload.exact_routed import EXPERTS


def on_routed(law: str, part: Part, model: str, variant: str = "", parameter: str = "*") -> Target:
    """Return a target on two ranks that split four experts, for a law that holds on any mesh."""
    return Target(law, part, model, variant, parameter=parameter, mesh="ep2")


class LastExpertsWrapper(ExpertsWrapper):
    """The base class of mutants that are broken only on the last rank of the experts, without ZeRO."""

    stages = (0,)
    is_last = False

    def spoil(self, layer: Any) -> None:
        self.is_last = self.place == self.size - 1


@mutant(
    FaultKind.CLIPPING,
    on_routed("training.loss_scale_power", Part.REDUCTION, "mlp_routed", parameter="moe.experts.*"),
    origin=Origin.MESH,
)
class LimitsTheGradientOfExperts(LastExpertsWrapper):
    """On the last rank, clamps the gradient of experts' outputs to the range of a loss whose weights are 1."""

    def spoil(self, layer: Any) -> None:
        super().spoil(layer)
        layer.register_forward_hook(self.limit)

    def limit(self, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Limit the gradient of the output of a layer of experts."""
        if self.is_last and output.requires_grad:
            limit = 1 / len(output)
            output.register_hook(lambda grad: grad.clamp(-limit, limit))  # type: ignore[no-untyped-call]


@mutant(
    FaultKind.STATE,
    on_routed("state.consolidate", Part.GATHER, "mixed_routed", parameter="moe.experts.*"),
    origin=Origin.MESH,
)
class NamesExpertsInReversedOrder(ExpertsWrapper):
    """Names the experts in reversed order in the full state dict, so that ranks' experts have each other's names."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        return {name: full[self.mirror(name)] for name in full}

    def mirror(self, name: str) -> str:
        """Return ``name`` with the number of its expert counted from the end."""
        last = EXPERTS - 1 if self.size > 1 else 0
        return re.sub(r"(?<=\.experts\.)\d+", lambda number: str(abs(last - int(number[0]))), name)


@mutant(
    FaultKind.STALE,
    on_routed("mesh.buffers", Part.FORWARD, "routed", parameter="seen_sum"),
    on_routed("training.buffers", Part.FORWARD, "stateful_routed", parameter="norm.running*"),
    origin=Origin.MESH,
)
class BuffersStandStillOnTheLastExpertRank(LastExpertsWrapper):
    """Restores the buffers after each forward on the last rank of the experts, so that they never change."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self.base(*args, **kwargs)
        for name, buffer in self.module.named_buffers() if self.is_last else ():
            buffer.data = before[name]
        return output


@mutant(
    FaultKind.AUTOCAST,
    on_routed("precision.buffers_keep_dtype", Part.OPTIMIZER, "mixed_routed", "declared", "shift"),
    on_routed("state.buffer_kinds", Part.GATHER, "random_routed", "float32", "values of the buffer, trained"),
    origin=Origin.MESH,
)
class RoundsTheBuffersOfTheLastExpertRank(LastExpertsWrapper):
    """Rounds the buffers of the last rank of the experts to bf16 in a step."""

    def step(self) -> None:
        self.base.step()
        for buffer in self.module.buffers() if self.is_last else ():
            if buffer.is_floating_point():
                buffer.copy_(buffer.bfloat16())
