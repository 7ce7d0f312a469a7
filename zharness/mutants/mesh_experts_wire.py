"""Define mutants of the traffic of tokens and gradients of experts. They wrap DeepSpeed's MoE, and need DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_wire(parameter: str, world_size: int = 2) -> Target:
    """Return a target of the law mesh.wire."""
    return Target("mesh.wire", Part.REDUCTION, "routed", parameter=parameter, world_size=world_size, mesh="ep2")


@mutant(FaultKind.RESOURCES, on_wire("elements of activations along dp_shard,ep"), origin=Origin.MESH)
class SendsTokensToExpertsAgain(ExpertsWrapper):
    """Exchanges the tokens of experts once more, and discards the result."""

    def spoil(self, layer: Any) -> None:
        layer.experts.register_forward_pre_hook(lambda _module, inputs: self.exchange(layer, inputs[0]))

    def exchange(self, layer: Any, tokens: Tensor) -> None:
        """Exchange tokens between the ranks that split the experts of ``layer``."""
        sent = tokens.detach().contiguous()
        dist.all_to_all_single(torch.empty_like(sent), sent, group=layer.ep_group)


@mutant(FaultKind.REDUCE_DTYPE, on_wire("activations along dp_shard,ep"), origin=Origin.MESH)
class SendsTokensToExpertsInBf16(ExpertsWrapper):
    """Sends tokens to their experts in bfloat16, which represents the integers of an exact model exactly."""

    def spoil(self, layer: Any) -> None:
        layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].bfloat16(), *inputs[1:]))
        layer.experts.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(), *inputs[1:]))
        layer.register_forward_hook(lambda _module, _inputs, output: output.float())


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along dp_shard", 4), origin=Origin.MESH)
class ReducesTheGradientsOfExpertsAgain(ExpertsWrapper):
    """In each backward, also all-reduces gradient buffers of experts over the ranks that have the same experts."""

    def spoil(self, layer: Any) -> None:
        self.shapes = [param.shape for param in layer.experts.parameters()]
        world = dist.get_world_size()
        groups = [dist.new_group(range(place, world, self.size)) for place in range(self.size)]
        self.copies = groups[self.place]

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for shape in self.shapes if self.size > 1 else ():
            dist.all_reduce(torch.zeros(shape), group=self.copies)
