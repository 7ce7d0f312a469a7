"""Define mutants of sequences and experts with checkpoints, evaluations and unused weights. They need DeepSpeed.

The laws that kill these mutants have models of their own; on these axes, stand-ins replace the models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.mutants.mesh_context import UlyssesWrapper, change_inputs
from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mesh_experts_steps import KnowsItsExperts
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def is_recomputing() -> bool:
    """Return whether a backward is running, so that the current forward is a recomputation."""
    return torch_private.current_graph_task_id() != -1


@mutant(
    FaultKind.GRAPH,
    Target("checkpointing.block", Part.REDUCTION, "blocks_context", "non_reentrant", mesh="cp2"),
    origin=Origin.MESH,
)
class RecomputesAttentionInAnotherOrder(UlyssesWrapper):
    """Reverses the order of this rank's queries and keys in a recomputed attention."""

    def spoil(self) -> None:
        change_inputs(self.module, self.reverse_recomputed)

    def reverse_recomputed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of attention, with query and key reversed along the tokens if a backward is running."""
        return (query.flip(1), key.flip(1), value) if is_recomputing() else (query, key, value)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("window.partly_used", Part.OPTIMIZER, "experts_context", "first_2_by_caller", mesh="cp2"),
    origin=Origin.MESH,
)
class LosesAPartOfAWeightThatTheLastLeavesOut(UlyssesWrapper):
    """On the last rank of a sequence, drops the accumulated gradients of the layers that a forward does not use."""

    stages = (0,)

    def spoil(self) -> None:
        self.layers = [module for module in self.module.modules() if isinstance(module, nn.Linear)]
        self.unused = set(self.layers)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, _inputs: self.unused.discard(layer))

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.size > 1:
            for layer in self.unused if self.place == self.size - 1 else ():
                layer.zero_grad()
            self.unused = set(self.layers)
        self.base.backward(loss, retain_graph=retain_graph)


@mutant(
    FaultKind.GRAPH,
    Target(
        "checkpointing.whole_model",
        Part.LOCAL_GRADIENT,
        "blocks_routed",
        "non_reentrant",
        parameter="input",
        mesh="ep2",
    ),
    origin=Origin.MESH,
)
class RecomputesExpertsWithOtherTokens(ExpertsWrapper):
    """Gives a recomputed layer of experts the tokens in reversed order."""

    def spoil(self, layer: Any) -> None:
        layer.register_forward_pre_hook(
            lambda _module, inputs: (inputs[0].flip(0), *inputs[1:]) if is_recomputing() else inputs
        )


@mutant(
    FaultKind.CONTRIBUTION,
    Target("window.evaluated", Part.OPTIMIZER, "experts_routed", "2_by_caller", mesh="ep2"),
    origin=Origin.MESH,
)
class ForgetsExpertsInAnEvaluation(KnowsItsExperts):
    """In a forward without gradients, clears the gradients that this rank's experts have accumulated."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in () if torch.is_grad_enabled() else self.own:
            parameter.grad = None
        return self.base(*args, **kwargs)
