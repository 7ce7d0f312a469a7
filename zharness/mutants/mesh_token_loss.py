"""Define mutants of a loss over tokens on a mesh: logits that are split, and micro-batches with unequal padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import TENSOR
from zharness.mutants.mesh import REP2, TP2, MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part
from zharness.workload.exact_tokens import PADDING


def on_token_loss(model: str, mesh: str = TP2, part: Part = Part.REDUCTION) -> Target:
    """Return a target of the law mesh.token_loss."""
    return on_mesh("mesh.token_loss", part, model, mesh)


class LogitsWrapper(MeshWrapper):
    """The base class of mutants that change the logits, or their gradient."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("head" if hasattr(self.module, "head") else "last")


@mutant(FaultKind.SCALE, on_token_loss("parallel_tokens"), origin=Origin.MESH)
class SumsTheGradientOfLogitsOverTensorRanks(LogitsWrapper):
    """Counts the gradient of split logits once for each rank of tp."""

    def changed_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return self.tensor_size * output - (self.tensor_size - 1) * output.detach()


@mutant(FaultKind.CONTRIBUTION, on_token_loss("sequence_tokens"), origin=Origin.MESH)
class LosesTheGradientOfOneRanksLogits(LogitsWrapper):
    """Gives the logits of the second rank of tp no gradient."""

    def changed_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.detach() + 0 * output if self.coordinates[TENSOR] else output


@mutant(FaultKind.CONTRIBUTION, on_token_loss("parallel_tokens", part=Part.FORWARD), origin=Origin.MESH)
class ShiftsTheLogitsOfOneRank(LogitsWrapper):
    """On the second rank of tp, subtracts one from the logits, as if the rank had its own maximum in the softmax."""

    def changed_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output - float(self.coordinates[TENSOR])


@mutant(FaultKind.CONTRIBUTION, on_token_loss("tokens", REP2, Part.ACCUMULATION), origin=Origin.MESH)
class KeepsTheLastMicroBatchAlone(MeshWrapper):
    """Drops the gradients of earlier micro-batches in each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.zero_grad()
        self.base.backward(loss, retain_graph=retain_graph)


@mutant(
    FaultKind.SCALE,
    on_token_loss("tokens", REP2, Part.LOCAL_GRADIENT),
    on_token_loss("tokens", part=Part.LOCAL_GRADIENT),
    origin=Origin.MESH,
)
class AveragesTheMeansOfRanks(MeshWrapper):
    """Computes a step's loss as the mean over ranks of each rank's mean over the tokens of all its micro-batches."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.losses: list[Tensor] = []

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if not find_targets(loss):
            self.base.backward(loss, retain_graph=retain_graph)
            return
        self.losses.append(loss)
        if len(self.losses) == self.config.accumulation_steps:
            own, total = (loss.new_tensor(float(sum(map(count_tokens, self.losses)))) for _ in range(2))
            dist.all_reduce(total)
            for each in self.losses:
                self.base.backward(each * total / (own * dist.get_world_size()))
            self.losses = []


def count_tokens(loss: Tensor) -> int:
    """Return the number of tokens that count in a cross-entropy."""
    return sum(int((target != PADDING).sum()) for target in find_targets(loss))


def find_targets(loss: Tensor) -> list[Tensor]:
    """Return the targets of the cross-entropies from which ``loss`` is computed."""
    targets = (getattr(node, "_saved_target", None) for node in walk_graph(loss.grad_fn))
    return [target for target in targets if target is not None and target.dim() == 1]


def walk_graph(node: Any) -> Iterator[Any]:
    """Return an iterator over the nodes of an autograd graph, from ``node`` along the first input of each node."""
    while node is not None:
        yield node
        node = node.next_functions[0][0] if node.next_functions else None
