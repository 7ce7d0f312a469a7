"""Define mutants of a pipeline that weigh tokens wrongly if micro-batches or replicas have unequal numbers of tokens.

The mutants report correct losses; only their gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part
from zharness.workload.exact_tokens import PADDING


def on_token_loss(variant: str, world_size: int = 2) -> Target:
    """Return a target of the law pipeline.token_loss."""
    return on_pipeline(Part.REDUCTION, "token_chain", law="pipeline.token_loss", variant=variant, world_size=world_size)


def count_tokens(target: Tensor) -> float:
    """Return the number of tokens that count, or 0 if the target has no tokens."""
    return 0.0 if target.is_floating_point() else float((target != PADDING).sum())


def scale_gradient(loss: Loss, find_factor: Callable[[Tensor], float]) -> Loss:
    """Return a loss with the same values and ``find_factor(target)`` times the gradient."""

    def scaled(output: Any, target: Tensor) -> Tensor:
        value = loss(output, target)
        return value.detach() + find_factor(target) * (value - value.detach())

    return scaled


class WeighsTokens(PipelineWrapper):
    """The base class of mutants that give the tokens of a micro-batch another weight in the gradient."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        targets = [target for _, target in micro_batches]
        if not sum(map(count_tokens, targets)):
            return super().train_batch(micro_batches, loss)
        return super().train_batch(micro_batches, scale_gradient(loss, self.build_factor(targets)))

    def build_factor(self, targets: Sequence[Tensor]) -> Callable[[Tensor], float]:
        """Return a function that returns the factor of a micro-batch's gradient, for a batch with ``targets``."""
        raise NotImplementedError


@mutant(FaultKind.SCALE, on_token_loss("gpipe"), on_token_loss("zbv"), origin=Origin.MESH)
class AveragesTheMeansOfMicroBatches(WeighsTokens):
    """Averages the gradient over each micro-batch's tokens and then over micro-batches, not over all tokens."""

    def build_factor(self, targets: Sequence[Tensor]) -> Callable[[Tensor], float]:
        average = sum(map(count_tokens, targets)) / len(targets)
        return lambda target: average / max(1.0, count_tokens(target))


@mutant(FaultKind.SCALE, on_token_loss("1f1b", world_size=4), origin=Origin.MESH)
class AveragesTheMeansOfReplicas(WeighsTokens):
    """Averages the gradient over each replica's tokens and then over replicas, not over all tokens."""

    def build_factor(self, targets: Sequence[Tensor]) -> Callable[[Tensor], float]:
        own, total = (torch.tensor(sum(map(count_tokens, targets))) for _ in range(2))
        dist.all_reduce(total)
        factor = float(total / (own * dist.get_world_size()))
        return lambda _target: factor


@mutant(FaultKind.SCALE, on_token_loss("interleaved"), origin=Origin.MESH)
class CountsPaddingAsTokens(WeighsTokens):
    """Divides the sum over tokens by the number of all positions, including positions with padding."""

    def build_factor(self, targets: Sequence[Tensor]) -> Callable[[Tensor], float]:
        factor = sum(map(count_tokens, targets)) / sum(target.numel() for target in targets)
        return lambda _target: factor


@mutant(FaultKind.CONTRIBUTION, on_token_loss("1f1b", world_size=4), origin=Origin.MESH)
class LosesMicroBatchesOfOneToken(WeighsTokens):
    """Drops the gradient of a micro-batch in which only one token counts."""

    def build_factor(self, targets: Sequence[Tensor]) -> Callable[[Tensor], float]:
        return lambda target: float(count_tokens(target) != 1)
