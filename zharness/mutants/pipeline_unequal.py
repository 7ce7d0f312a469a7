"""Define mutants of a pipeline that are right for micro-batches of equal sizes, and wrong for unequal sizes.

torch's schedules refuse unequal sizes in a batch. Most of these mutants therefore subclass an engine that runs each
micro-batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import Capabilities, EngineConfig, Feature, torch_pp
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.mutants.pipeline_token_loss import scale_gradient
from zharness.parity import Part


def on_unequal(
    part: Part, model: str, parameter: str = "blocks.*", variant: str = "gpipe", world_size: int = 2
) -> Target:
    """Return a target of the law pipeline.unequal_micro_batches."""
    return on_pipeline(part, model, parameter, "pipeline.unequal_micro_batches", variant, world_size=world_size)


def claim_unequal_sizes(base: Capabilities) -> Capabilities:
    """Return ``base`` without the refusal of micro-batches of unequal sizes."""
    refuses = dict(base.refuses)
    refuses.pop(Feature.UNEQUAL_MICRO_BATCHES, None)
    return replace(base, refuses=refuses)


class RunsEachAlone(PipelineWrapper):
    """A correct engine that runs each micro-batch of a batch alone, in its own schedule, so that sizes may differ."""

    capabilities = claim_unequal_sizes(torch_pp.CAPABILITIES)

    @classmethod
    def claims(cls, base: Capabilities) -> Capabilities:
        return super().claims(claim_unequal_sizes(base))

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        earlier = {parameter: parameter.grad for parameter in self.parameters_with_grad()}
        for parameter in earlier:
            parameter.grad = None
        # torch_pp keeps a schedule, with its shapes, for each loss function; partial makes a new loss function.
        losses = [own for batch in micro_batches for own in self.base.train_batch([batch], partial(loss))]
        for parameter in self.parameters_with_grad():
            assert parameter.grad is not None
            parameter.grad /= len(micro_batches)
            before = earlier.get(parameter)
            parameter.grad += 0 if before is None else before
        return losses


def count_samples(micro_batches: MicroBatches) -> list[int]:
    """Return the number of samples of each micro-batch."""
    return [len(inputs) for inputs, _ in micro_batches]


@mutant(FaultKind.CONTRIBUTION, on_unequal(Part.FORWARD, "chain", "loss*"), origin=Origin.MESH)
class CutsToTheSamplesOfTheFirst(RunsEachAlone):
    """Cuts each micro-batch to the number of samples of the first micro-batch of its batch."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        first, *_ = count_samples(micro_batches)
        return super().train_batch([(inputs[:first], target[:first]) for inputs, target in micro_batches], loss)


@mutant(FaultKind.CONTRIBUTION, on_unequal(Part.FORWARD, "skips", "loss*"), origin=Origin.MESH)
class PadsToTheLargest(RunsEachAlone):
    """Pads each micro-batch with samples of zeros to the size of the largest micro-batch of its batch."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        most = max(count_samples(micro_batches))

        def pad(tensor: Tensor) -> Tensor:
            """Return ``tensor`` with zeros behind it."""
            return torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])

        return super().train_batch([(pad(inputs), pad(target)) for inputs, target in micro_batches], loss)


class WeighsSamples(RunsEachAlone):
    """The base class of mutants that report right losses, but weigh micro-batches wrongly in the gradient."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        return super().train_batch(micro_batches, scale_gradient(loss, self.build_factor(count_samples(micro_batches))))

    def build_factor(self, samples: Sequence[int]) -> Callable[[Tensor], float]:
        """Return a function from a micro-batch's target to its factor, in a batch with these numbers of ``samples``."""
        raise NotImplementedError


@mutant(
    FaultKind.SCALE,
    on_unequal(Part.REDUCTION, "odd_chain"),
    on_unequal(Part.REDUCTION, "tied_chain"),
    origin=Origin.MESH,
)
class AveragesOverSamples(WeighsSamples):
    """Averages the gradient over all samples of a batch instead of averaging the means of its micro-batches."""

    def build_factor(self, samples: Sequence[int]) -> Callable[[Tensor], float]:
        average = sum(samples) / len(samples)
        return lambda target: len(target) / average


@mutant(FaultKind.SCALE, on_unequal(Part.REDUCTION, "chain", world_size=4), origin=Origin.MESH)
class AveragesReplicasBySamples(WeighsSamples):
    """Weights each replica in the mean over a stage's replicas by the number of samples in its batch."""

    def build_factor(self, samples: Sequence[int]) -> Callable[[Tensor], float]:
        own, total = (torch.tensor(float(sum(samples))) for _ in range(2))
        dist.all_reduce(total)
        factor = float(own * dist.get_world_size() / total)
        return lambda _target: factor


@mutant(FaultKind.STALE, on_unequal(Part.ACCUMULATION, "skips", variant="after_equal"), origin=Origin.MESH)
class LosesSmallerOnesAfterEqualOnes(WeighsSamples):
    """After a batch of equal sizes, drops the gradients of micro-batches that have fewer samples than that batch's."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before: set[int] = set()

    def build_factor(self, samples: Sequence[int]) -> Callable[[Tensor], float]:
        fewest = min(self.before) if len(self.before) == 1 else 0
        self.before = {*samples}
        return lambda target: float(len(target) >= fewest)


@mutant(FaultKind.STALE, on_unequal(Part.REDUCTION, "chain", "blocks.[01].*"), origin=Origin.MESH)
class ReadsTheEndOfALargerBuffer(RunsEachAlone):
    """Writes the gradient of an activation to the start of a buffer that may be larger, but reads the buffer's end."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.buffer = torch.empty(0)
        self.module.get_submodule("blocks.1").register_forward_hook(self.change)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return the output; its gradient is read from the buffer."""
        if output.requires_grad:
            output.register_hook(self.read)  # type: ignore[no-untyped-call]
        return output

    def read(self, grad: Tensor) -> Tensor:
        """Write a gradient to the start of the buffer, and return the end of it."""
        if len(self.buffer) < len(grad):
            self.buffer = torch.zeros_like(grad)
        self.buffer[: len(grad)] = grad
        return self.buffer[-len(grad) :].clone()


@mutant(
    FaultKind.STALE,
    on_unequal(Part.FORWARD, "chain", "loss*", variant="large_first"),
    on_unequal(Part.FORWARD, "odd_chain", "loss*", variant="small_first"),
    on_unequal(Part.FORWARD, "skips", "loss*", variant="large_first_1f1b", world_size=4),
    on_unequal(Part.FORWARD, "odd_chain", "loss*", variant="small_first_zbv"),
    origin=Origin.MESH,
)
class KeepsTheSizesOfTheFirstBatch(PipelineWrapper):
    """Receives micro-batches in buffers of the first batch's sizes, which cuts samples off or appends old samples."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.buffers: list[list[Tensor]] = []

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        if not self.buffers:
            self.buffers = [[tensor.clone() for tensor in batch] for batch in micro_batches]
        for buffers, batch in zip(self.buffers, micro_batches, strict=True):
            for buffer, tensor in zip(buffers, batch, strict=True):
                samples = min(len(buffer), len(tensor))
                buffer[:samples] = tensor[:samples]
        return super().train_batch([(inputs.clone(), target.clone()) for inputs, target in self.buffers], loss)
