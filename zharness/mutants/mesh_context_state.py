"""Define mutants of sequences that are right in a first backward, but wrong in later steps, losses or saved state.

The mutants wrap DeepSpeed's Ulysses, and need DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.initial_weights import copy_weights
from zharness.mutants.mesh_context import UlyssesWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_sequence(law: str, part: Part, model: str, variant: str = "", parameter: str = "*") -> Target:
    """Return a target on two ranks that split a sequence, for a law that holds on any mesh."""
    return Target(law, part, model, variant, parameter=parameter, mesh="cp2")


class LastPartWrapper(UlyssesWrapper):
    """The base class of mutants that are broken only on the last rank of a sequence, at stage 0."""

    stages = (0,)
    is_last = False

    def spoil(self) -> None:
        self.is_last = self.place == self.size - 1


@mutant(FaultKind.OPTIMIZER, on_sequence("training.free_running", Part.OPTIMIZER, "mlp_context"), origin=Origin.MESH)
class DecaysTheWeightsOfTheLastPartTwice(LastPartWrapper):
    """After the first step, shrinks the last rank's copy of the weights by 0.1 % once more in each step."""

    steps = 0

    def step(self) -> None:
        self.base.step()
        self.steps += 1
        with torch.no_grad():
            for parameter in self.module.parameters() if self.is_last and self.steps > 1 else ():
                parameter.mul_(0.999)


@mutant(
    FaultKind.CLIPPING,
    on_sequence("training.loss_scale_power", Part.REDUCTION, "mlp_context"),
    origin=Origin.MESH,
)
class LimitsTheGradientOfTheLastPart(LastPartWrapper):
    """On the last rank of a sequence, clamps the gradient of the output to the range of a loss whose weights are 1."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if self.is_last and output.requires_grad:
            limit = 1 / len(output)
            output.register_hook(lambda grad: grad.clamp(-limit, limit))
        return output


@mutant(FaultKind.STATE, on_sequence("state.consolidate", Part.GATHER, "mixed_context"), origin=Origin.MESH)
class TheLastPartSavesOldWeights(LastPartWrapper):
    """On the last rank of a sequence, returns the weights from before training in the full state dict."""

    def spoil(self) -> None:
        super().spoil()
        self.old: dict[str, Tensor] = self.base.full_state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.base.full_state_dict()
        return self.old if self.is_last else found


@mutant(FaultKind.RANKS, on_sequence("parameters.initial_weights", Part.GATHER, "odd_one_context"), origin=Origin.MESH)
class TheLastPartBeginsWithItsOwnWeights(LastPartWrapper):
    """Trains the last rank of a sequence with its own model's weights, as if only data ranks got rank 0's weights."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own = copy_weights(model)
        super().__init__(model, config)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters() if self.is_last else ():
                parameter.copy_(own[name])


@mutant(
    FaultKind.AUTOCAST,
    on_sequence("precision.buffers_keep_dtype", Part.OPTIMIZER, "mixed_context", "declared", "shift"),
    on_sequence("state.buffer_kinds", Part.GATHER, "random_context", "float32", "values of the buffer, trained"),
    origin=Origin.MESH,
)
class DividesTheBuffersOfTheLastPart(LastPartWrapper):
    """In a step, divides the last rank's buffers by the ranks of a sequence, as if the buffers were sums of parts."""

    def step(self) -> None:
        self.base.step()
        for buffer in self.module.buffers() if self.is_last else ():
            if buffer.is_floating_point():
                buffer.div_(self.size)
