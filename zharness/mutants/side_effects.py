"""Mutants that change the caller's model, inputs or process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.mutants.around import Around
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
)
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="mode of *"),
    origin=Origin.ONLOOKERS,
)
class TrainsInEvaluation(Around):
    """Switches the model to training mode before every forward."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.train()
        return self.right(*args, **kwargs)


@mutant(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="precision of matrix products"),
    origin=Origin.ORDERS,
)
class LowersMatrixProducts(Around):
    """Lowers the precision of matrix products in the whole process at construction, as if for speed."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.set_float32_matmul_precision("high")
        super().__init__(model, config)

    def close(self) -> None:
        self.right.close()
        torch.set_float32_matmul_precision("highest")  # the next cell of the process must have full precision


@mutant(
    FaultKind.STALE, Target("training.any_order", Part.FORWARD, variant="steps", parameter="loss"), origin=Origin.ORDERS
)
class LogsTheMeanLoss(Around):
    """Averages the loss over ranks for its log, and overwrites the caller's loss tensor with the mean."""

    over = "ddp"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        dist.all_reduce(loss.data)
        loss.data /= dist.get_world_size()


@mutant(
    FaultKind.GRAPH,
    Target("training.any_order", Part.FORWARD, variant="steps", parameter="inputs"),
    origin=Origin.ORDERS,
)
class WantsGradientsOfInputs(Around):
    """Makes the caller's input tensors require a gradient, as if for reentrant checkpoints."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf and torch.is_grad_enabled():
                value.requires_grad_()
        return self.right(*args, **kwargs)
