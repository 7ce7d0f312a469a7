"""Define mutants of sequences and experts that read memory which nothing wrote, or make too many calls in Python.

The mutants need DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zharness.mutants.mesh_context import UlyssesWrapper
from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def add_unwritten(output: Tensor) -> Tensor:
    """Return ``output`` plus unwritten memory times 0, as if 0 were the mask of padding."""
    return output + 0 * torch.empty_like(output)


@mutant(
    FaultKind.STALE,
    Target("resources.poisoned_memory", Part.FORWARD, "mlp_context", parameter="loss", mesh="cp2"),
    origin=Origin.MESH,
)
class MasksThePaddingOfPartsByZero(UlyssesWrapper):
    """Joins the parts of the output in padded memory, and multiplies the unwritten padding by 0."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return add_unwritten(output) if self.size > 1 else output


@mutant(
    FaultKind.STALE,
    Target("resources.poisoned_memory", Part.FORWARD, "mlp_routed", parameter="loss", mesh="ep2"),
    origin=Origin.MESH,
)
class MasksThePlacesOfMissingTokensByZero(ExpertsWrapper):
    """Multiplies the places of an expert that no token takes by 0, instead of writing zeros to these places."""

    def spoil(self, layer: Any) -> None:
        layer.experts.register_forward_hook(lambda _module, _inputs, output: add_unwritten(output))


class LooksForNames(EngineWrapper):
    """The base class of mutants that search all names for the name of each parameter after each backward."""

    size: int

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for parameter in self.module.parameters() if self.size > 1 else ():
            self.find_name(parameter)

    def find_name(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter of the module."""
        return next(name for name, each in self.module.named_parameters() if each is parameter)


@mutant(
    FaultKind.RESOURCES,
    Target("resources.hook_count", model="mlp_context", parameter="calls", mesh="cp2"),
    origin=Origin.MESH,
)
class LooksForTheNameOfEachPart(LooksForNames, UlyssesWrapper):
    """Searches all names for the name of each gradient that is summed over a sequence."""


@mutant(
    FaultKind.RESOURCES,
    Target("resources.hook_count", model="mlp_routed", parameter="calls", mesh="ep2"),
    origin=Origin.MESH,
)
class LooksForTheNameOfEachExpert(LooksForNames, ExpertsWrapper):
    """Searches all names for the name of each gradient, to find out whether it belongs to an expert."""
