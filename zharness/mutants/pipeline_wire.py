"""Define mutants of a pipeline that send other numbers, dtypes or messages from stage to stage than they should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.integer_gradients import HINT, misread_gradient
from zharness.mesh import AXES, DATA_SHARD, PIPELINE, TENSOR, Mesh
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part

BIAS = 16  # the elements of a bias of the models, a quarter of those of a module's outputs


def on_wire(part: Part, parameter: str, variant: str = "gpipe") -> Target:
    """Return a target on the model whose activations and gradients need all bits of float32."""
    return on_pipeline(part, "random_chain", parameter, variant=variant)


def on_split_wire(law: str = "pipeline.training", variant: str = "gpipe", parameter: str = "blocks.*") -> Target:
    """Return a target on the same model beside tp, which rounds losses in parts, so that gradients alone are judged."""
    return on_pipeline(Part.REDUCTION, "random_chain", parameter, law, variant, world_size=4, mesh="pp2.tp2")


class ChangesAMessage(PipelineWrapper):
    """The base class of mutants that change what a block at the end of a stage sends."""

    sender = "blocks.1"  # the last block of the first of two stages

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule(self.sender).register_forward_hook(self.change)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return what the next stage gets."""
        raise NotImplementedError


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire(Part.FORWARD, "loss*"),
    on_split_wire(),
    on_split_wire("pipeline.learning_rate", ""),
    origin=Origin.MESH,
)
class SendsActivationsInHalfPrecision(ChangesAMessage):
    """A stage sends its output to the next one in fp16, and gets the gradient in full."""

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + (output.half().to(output.dtype) - output).detach()


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire(Part.LOCAL_GRADIENT, "blocks.0.*", "1f1b"),
    on_split_wire(variant="1f1b", parameter="blocks.[01].*"),
    on_split_wire("pipeline.any_order", "1f1b", "blocks.[01].*"),
    origin=Origin.MESH,
)
class SendsGradientsOfActivationsInHalfPrecision(ChangesAMessage):
    """A stage gets its input in full, and sends the gradient of it back in bf16."""

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: grad.to(torch.bfloat16).to(grad.dtype))  # type: ignore[no-untyped-call]
        return output


@mutant(FaultKind.REDUCE_DTYPE, on_wire(Part.FORWARD, "loss*", "interleaved"), origin=Origin.MESH)
class RoundsTheFirstOfThreeMessages(ChangesAMessage):
    """Of four stages in turn on two ranks, the first one sends in fp16, and only for the second micro-batch."""

    sender = "blocks.0"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.sent = 0

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        self.sent += 1
        return output + (output.half().to(output.dtype) - output).detach() if self.sent == 2 else output


@mutant(
    FaultKind.STALE,
    on_pipeline(Part.REDUCTION, "masked_chain", "blocks.0.*", cause=HINT, world_size=4, mesh="pp4"),
    origin=Origin.MESH,
    imitates="https://github.com/tdrussell/diffusion-pipe/pull/544",
)
class ReadsGradientsAsIntegers(PipelineWrapper):
    """A stage between two others receives the gradient of its output in the buffer of a mask of integers."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for name in ("blocks.1", "blocks.2"):
            self.module.get_submodule(name).register_forward_hook(misread_gradient)


def on_messages(parameter: str, variant: str = "gpipe", dtype: str = "fp32") -> Target:
    """Return a target of the law of what stages send."""
    target = on_pipeline(Part.REDUCTION, "chain", parameter, law="pipeline.wire", variant=variant)
    return replace(target, dtype=dtype)


def on_replicas_wire(parameter: str) -> Target:
    """Return a target of this law with two replicas of each stage."""
    return replace(on_messages(parameter, "1f1b"), world_size=4)


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_messages("activations along pp"),
    on_messages("activations along pp", "1f1b", "bf16"),
    origin=Origin.MESH,
)
class SendsWideActivations(ChangesAMessage):
    """A stage sends its output in the next wider dtype, in which its gradient comes back, too."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.2").register_forward_pre_hook(self.narrow)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.double() if output.dtype is torch.float32 else output.float()

    def narrow(self, module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Return the input in the dtype of the cell."""
        return (inputs[0].to(DTYPES[self.config.dtype]),)


class SendsAgain(PipelineWrapper):
    """The base class of mutants of which one of two stages sends a message of zeros after each batch."""

    sender = 0
    shape = (4, 16)  # of one output of a block

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        self.send(torch.zeros(self.shape))
        return losses

    def send(self, message: Tensor) -> None:
        """Send ``message`` from one rank to the other one."""
        if dist.get_rank() == self.sender:
            dist.send(message, 1 - self.sender)
        else:
            dist.recv(message, self.sender)


@mutant(FaultKind.RESOURCES, on_messages("elements of activations to pp 1"), origin=Origin.MESH)
class SendsAnActivationTwice(SendsAgain):
    """The first stage sends one output to the next one twice."""


@mutant(FaultKind.RESOURCES, on_messages("elements of activations to pp 0", "zbv"), origin=Origin.MESH)
class SendsAGradientOfAnActivationTwice(SendsAgain):
    """The last stage sends the gradient of one of its inputs back twice."""

    sender = 1


@mutant(FaultKind.RESOURCES, on_messages("elements of activations along pp", "interleaved"), origin=Origin.MESH)
class GathersActivationsOnAllStages(SendsAgain):
    """Every stage gets the outputs of all, by an all-gather of 64 elements of each."""

    def send(self, message: Tensor) -> None:
        dist.all_gather([torch.empty_like(message) for _ in range(dist.get_world_size())], message)


@mutant(
    FaultKind.RESOURCES,
    replace(on_replicas_wire("elements of gradients along dp_shard"), setting="fully_shard"),
    origin=Origin.MESH,
)
class ReducesGradientsOfAStageAgain(PipelineWrapper):
    """After each batch the replicas of a stage all-reduce buffers of whole gradients once more, and use none."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        shards: dict[str, Any] = dict(seams_engines.stage_params(self.base))
        for shard in shards.values():
            dist.all_reduce(torch.zeros(shard.shape), group=shard.device_mesh.get_group(DATA_SHARD))
        return losses


@mutant(FaultKind.REDUCE_DTYPE, on_replicas_wire("gradients along dp_shard"), origin=Origin.MESH)
class ReducesStagesInFloat64(PipelineWrapper):
    """The DDP of each stage reduces gradients in float64, by a hook, and gets the right ones."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        stages: list[Any] = list(seams_engines.stage_modules(self.base))
        for stage in stages:
            if hasattr(stage, "register_comm_hook"):
                # DDP refuses a function with annotations that are text.
                stage.register_comm_hook(stage.process_group, lambda group, bucket: self.reduce(group, bucket))

    def reduce(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        """Return a future with the mean of a bucket over ``group``."""
        wide = bucket.buffer().double()
        dist.all_reduce(wide, group=group)
        future: Any = torch.futures.Future()
        future.set_result((wide / dist.get_world_size(group)).to(bucket.buffer().dtype))
        return future


def on_tensor_ranks(parameter: str, variant: str = "1f1b") -> Target:
    """Return a target of this law with each stage split over tp."""
    return replace(on_messages(parameter, variant), world_size=4, mesh="pp2.tp2")


class SendsAlongAxes(PipelineWrapper):
    """The base class of mutants whose ranks send a message once more after each batch, to those that ``axes`` join."""

    axes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.join_ranks(config.mesh)

    def join_ranks(self, mesh: Mesh) -> None:
        """Make the group of the ranks of ``mesh`` that differ from this one on ``axes`` alone. This is a collective."""
        world, others = dist.get_world_size(), [axis for axis in AXES if axis not in self.axes]
        places = [mesh.coordinates(rank, world) for rank in range(world)]
        keys = [tuple(place[axis] for axis in others) for place in places]
        groups = {key: [rank for rank in range(world) if keys[rank] == key] for key in dict.fromkeys(keys)}
        made = {key: dist.new_group(ranks) for key, ranks in groups.items()}
        self.ranks, self.group = groups[keys[dist.get_rank()]], made[keys[dist.get_rank()]]

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        self.send(micro_batches)
        return losses

    def send(self, micro_batches: MicroBatches) -> None:
        """Send the message, and do not use it."""
        raise NotImplementedError

    def stage_sizes(self) -> list[int]:
        """Return the number of elements of each parameter of this rank's stages."""
        return [param.numel() for param in seams_engines.stage_params(self.base).values()]


class ReducesBuffers(SendsAlongAxes):
    """The base class of mutants that all-reduce a buffer for each parameter of a stage once more."""

    def send(self, micro_batches: MicroBatches) -> None:
        for elements in self.stage_sizes():
            dist.all_reduce(torch.zeros(elements), group=self.group)


@mutant(
    FaultKind.RESOURCES,
    replace(on_tensor_ranks("elements of gradients along dp_shard,tp"), world_size=8, setting="fully_shard"),
    origin=Origin.MESH,
)
class ReducesGradientsOverDataAndTensorRanks(ReducesBuffers):
    """The ranks of a stage, which differ on the data and on tp, all-reduce buffers of gradients in one group."""

    axes: ClassVar[tuple[str, ...]] = (DATA_SHARD, TENSOR)


@mutant(FaultKind.RESOURCES, on_replicas_wire("elements of gradients along pp,dp_shard"), origin=Origin.MESH)
class ReducesABiasOverStagesAndData(SendsAlongAxes):
    """All ranks, which differ on pp and on the data, all-reduce a buffer as large as a bias."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE, DATA_SHARD)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.all_reduce(torch.zeros(BIAS), group=self.group)


@mutant(FaultKind.RESOURCES, on_messages("elements of weights along pp", "zbv"), origin=Origin.MESH)
class GathersABiasOnAllStages(SendsAlongAxes):
    """Every stage gets a vector as large as a bias of all others, which is less than the outputs of a module."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE,)

    def send(self, micro_batches: MicroBatches) -> None:
        bias = torch.zeros(BIAS)
        dist.all_gather([torch.empty_like(bias) for _ in self.ranks], bias, group=self.group)


@mutant(
    FaultKind.RESOURCES,
    on_replicas_wire("elements of broadcasts along dp_shard"),
    replace(on_replicas_wire("elements of broadcasts along dp_shard"), setting="fully_shard"),
    origin=Origin.MESH,
)
class BroadcastsAWeightToItsReplicas(SendsAlongAxes):
    """After each batch a stage broadcasts one weight to its replicas, which have it already."""

    axes: ClassVar[tuple[str, ...]] = (DATA_SHARD,)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.broadcast(torch.zeros(self.stage_sizes()[0]), src=self.ranks[0], group=self.group)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of activations along tp"), origin=Origin.MESH)
class ReducesTheInputOfAStageOverTensorRanks(SendsAlongAxes):
    """The ranks of tp, which have the same inputs, all-reduce those of one micro-batch once more."""

    axes: ClassVar[tuple[str, ...]] = (TENSOR,)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.all_reduce(torch.zeros_like(micro_batches[0][0]), group=self.group)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of gradients along tp", "interleaved"), origin=Origin.MESH)
class ReducesSplitGradientsOverTensorRanks(ReducesBuffers):
    """The ranks of tp, which have parts of each weight, all-reduce buffers of gradients."""

    axes: ClassVar[tuple[str, ...]] = (TENSOR,)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of activations to pp,tp 1,1"), origin=Origin.MESH)
class SendsToAnotherTensorRankOfTheNextStage(SendsAlongAxes):
    """The first rank of the first stage sends to the last rank of the last stage, whose place on tp differs."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE, TENSOR)

    def send(self, micro_batches: MicroBatches) -> None:
        first, *_, last = self.ranks
        if dist.get_rank() == first:
            dist.send(torch.zeros(4), last)
        elif dist.get_rank() == last:
            dist.recv(torch.zeros(4), first)
