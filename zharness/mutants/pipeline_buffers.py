"""Define mutants of a pipeline whose blocks have buffers that forwards change, and whose buffers are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.protocol import Piece
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part


def on_buffers(variant: str, parameter: str = "*", part: Part = Part.FORWARD, world_size: int = 2) -> Target:
    """Return a target of the law pipeline.buffers."""
    return on_pipeline(part, "chain", parameter, "pipeline.buffers", variant, world_size=world_size)


@mutant(
    FaultKind.CONTRIBUTION,
    on_buffers("gpipe", "blocks.0.*"),
    origin=Origin.MESH,
    imitates="https://github.com/pytorch/pytorch/pull/188558",
)
class LearnsShapesByAForward(PipelineWrapper):
    """Runs the first block once more before each batch, as if to learn a shape, which changes its buffers again."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        with torch.no_grad():
            self.module.get_submodule("blocks.0")(micro_batches[0][0])
        return super().train_batch(micro_batches, loss)


@mutant(FaultKind.STALE, on_buffers("1f1b", "blocks.2.*"), on_buffers("zero_bubble"), origin=Origin.MESH)
class BuffersOfTheLastStageStandStill(PipelineWrapper):
    """Undoes the changes that the forwards of a batch make to the buffers of the last stage."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        losses = super().train_batch(micro_batches, loss)
        for name, value in before.items() if dist.get_rank() else ():
            self.module.get_buffer(name).copy_(value)
        return losses


@mutant(FaultKind.STATE, on_buffers("loaded", "blocks.0.*", Part.GATHER), origin=Origin.MESH)
class SavesBuffersAsTheyWereBuilt(PipelineWrapper):
    """Saves buffers with the values that they had when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.built = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def save(self, path: Path) -> None:
        now = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.set_buffers(self.built)
        self.base.save(path)
        self.set_buffers(now)

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers of the model to ``values``."""
        for name, value in values.items():
            self.module.get_buffer(name).copy_(value)


@mutant(FaultKind.PARAMETERS, on_buffers("evaluated", "blocks.2.*"), origin=Origin.MESH)
class TrainsBlocksInEvaluationMode(PipelineWrapper):
    """Puts all blocks into training mode before each batch, as DeepSpeed does."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        self.module.train()
        return super().train_batch(micro_batches, loss)


@mutant(FaultKind.RANKS, on_buffers("1f1b", "*.seen_sum", world_size=4), origin=Origin.MESH)
class AveragesBuffersOfReplicas(PipelineWrapper):
    """Averages floating-point buffers over all ranks after each batch."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())
        return losses


@mutant(FaultKind.RESOURCES, on_buffers("interleaved", "owners of *"), origin=Origin.MESH)
class OwnsTheStagesOfOtherRanks(PipelineWrapper):
    """Reports a layout in which every rank owns all weights."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return {
            name: tuple(Piece(rank, 0, param.numel()) for rank in range(dist.get_world_size()))
            for name, param in self.module.named_parameters()
        }
