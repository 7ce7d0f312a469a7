"""Define mutants of a pipeline whose ranks send wrong numbers, wrong dtypes or too many messages."""

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

BIAS = 16  # the number of elements of a bias, a quarter of the elements of a module's output


def on_wire(part: Part, parameter: str, variant: str = "gpipe") -> Target:
    """Return a target on the model whose activations and gradients need all bits of float32."""
    return on_pipeline(part, "random_chain", parameter, variant=variant)


def on_split_wire(law: str = "pipeline.training", variant: str = "gpipe", parameter: str = "blocks.*") -> Target:
    """Return a target on the same model with tp, which rounds losses in parts, so that only gradients are judged."""
    return on_pipeline(Part.REDUCTION, "random_chain", parameter, law, variant, world_size=4, mesh="pp2.tp2")


class ChangesAMessage(PipelineWrapper):
    """The base class of mutants that change the output that the last block of a stage sends."""

    sender = "blocks.1"  # the last block of the first of two stages

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule(self.sender).register_forward_hook(self.change)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return the output that the next stage receives."""
        raise NotImplementedError


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire(Part.FORWARD, "loss*"),
    on_split_wire(),
    on_split_wire("pipeline.learning_rate", ""),
    origin=Origin.MESH,
)
class SendsActivationsInHalfPrecision(ChangesAMessage):
    """Sends the output of a stage in fp16, but its gradient in full precision."""

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
    """Sends the gradient of a stage's input back in bf16, but the input itself in full precision."""

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: grad.to(torch.bfloat16).to(grad.dtype))  # type: ignore[no-untyped-call]
        return output


@mutant(FaultKind.REDUCE_DTYPE, on_wire(Part.FORWARD, "loss*", "interleaved"), origin=Origin.MESH)
class RoundsTheFirstOfThreeMessages(ChangesAMessage):
    """Sends one message in fp16: the output of the first of four interleaved stages for the second micro-batch."""

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
    """Receives the gradient of a middle stage's output in the integer buffer of a mask, which misreads its bits."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for name in ("blocks.1", "blocks.2"):
            self.module.get_submodule(name).register_forward_hook(misread_gradient)


def on_messages(parameter: str, variant: str = "gpipe", dtype: str = "fp32") -> Target:
    """Return a target of the law pipeline.wire."""
    target = on_pipeline(Part.REDUCTION, "chain", parameter, law="pipeline.wire", variant=variant)
    return replace(target, dtype=dtype)


def on_replicas_wire(parameter: str) -> Target:
    """Return a target of the law pipeline.wire with two replicas of each stage."""
    return replace(on_messages(parameter, "1f1b"), world_size=4)


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_messages("activations along pp"),
    on_messages("activations along pp", "1f1b", "bf16"),
    origin=Origin.MESH,
)
class SendsWideActivations(ChangesAMessage):
    """Sends the output of a stage, and the gradient of this output, in the next wider dtype."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.2").register_forward_pre_hook(self.narrow)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.double() if output.dtype is torch.float32 else output.float()

    def narrow(self, module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Return the input in the dtype of the cell."""
        return (inputs[0].to(DTYPES[self.config.dtype]),)


class SendsAgain(PipelineWrapper):
    """The base class of mutants in which one of two ranks sends a message of zeros to the other after each batch."""

    sender = 0
    shape = (4, 16)  # the shape of one output of a block

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
    """Sends one more message, as large as an output, from the first to the second rank after each batch."""


@mutant(FaultKind.RESOURCES, on_messages("elements of activations to pp 0", "zbv"), origin=Origin.MESH)
class SendsAGradientOfAnActivationTwice(SendsAgain):
    """Sends one more message, as large as an input's gradient, from the second to the first rank after each batch."""

    sender = 1


@mutant(FaultKind.RESOURCES, on_messages("elements of activations along pp", "interleaved"), origin=Origin.MESH)
class GathersActivationsOnAllStages(SendsAgain):
    """All-gathers 64 more elements of every rank, as many as an output has, over all ranks after each batch."""

    def send(self, message: Tensor) -> None:
        dist.all_gather([torch.empty_like(message) for _ in range(dist.get_world_size())], message)


@mutant(
    FaultKind.RESOURCES,
    replace(on_replicas_wire("elements of gradients along dp_shard"), setting="fully_shard"),
    origin=Origin.MESH,
)
class ReducesGradientsOfAStageAgain(PipelineWrapper):
    """After each batch, all-reduces unused buffers as large as whole gradients over the ranks of a stage."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        shards: dict[str, Any] = dict(seams_engines.stage_params(self.base))
        for shard in shards.values():
            dist.all_reduce(torch.zeros(shard.shape), group=shard.device_mesh.get_group(DATA_SHARD))
        return losses


@mutant(FaultKind.REDUCE_DTYPE, on_replicas_wire("gradients along dp_shard"), origin=Origin.MESH)
class ReducesStagesInFloat64(PipelineWrapper):
    """Reduces the gradients of each stage in float64, by a communication hook of DDP; the gradients are right."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        stages: list[Any] = list(seams_engines.stage_modules(self.base))
        for stage in stages:
            if hasattr(stage, "register_comm_hook"):
                # DDP refuses a hook whose annotations are strings.
                stage.register_comm_hook(stage.process_group, lambda group, bucket: self.reduce(group, bucket))

    def reduce(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        """Return a future with the mean of a bucket over ``group``."""
        wide = bucket.buffer().double()
        dist.all_reduce(wide, group=group)
        future: Any = torch.futures.Future()
        future.set_result((wide / dist.get_world_size(group)).to(bucket.buffer().dtype))
        return future


def on_tensor_ranks(parameter: str, variant: str = "1f1b") -> Target:
    """Return a target of the law pipeline.wire with each stage split over tp."""
    return replace(on_messages(parameter, variant), world_size=4, mesh="pp2.tp2")


class SendsAlongAxes(PipelineWrapper):
    """The base class of mutants that send one more message after each batch to ranks that differ along ``axes``."""

    axes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.join_ranks(config.mesh)

    def join_ranks(self, mesh: Mesh) -> None:
        """Make the group of the ranks of ``mesh`` that differ from this rank on ``axes`` only. This is a collective."""
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
        """Send the message; no rank uses it."""
        raise NotImplementedError

    def stage_sizes(self) -> list[int]:
        """Return the number of elements of each parameter of this rank's stages."""
        return [param.numel() for param in seams_engines.stage_params(self.base).values()]


class ReducesBuffers(SendsAlongAxes):
    """The base class of mutants that all-reduce one more buffer for each parameter of a stage."""

    def send(self, micro_batches: MicroBatches) -> None:
        for elements in self.stage_sizes():
            dist.all_reduce(torch.zeros(elements), group=self.group)


@mutant(
    FaultKind.RESOURCES,
    replace(on_tensor_ranks("elements of gradients along dp_shard,tp"), world_size=8, setting="fully_shard"),
    origin=Origin.MESH,
)
class ReducesGradientsOverDataAndTensorRanks(ReducesBuffers):
    """All-reduces buffers as large as gradients in one group of all ranks of a stage, along dp_shard and tp at once."""

    axes: ClassVar[tuple[str, ...]] = (DATA_SHARD, TENSOR)


@mutant(FaultKind.RESOURCES, on_replicas_wire("elements of gradients along pp,dp_shard"), origin=Origin.MESH)
class ReducesABiasOverStagesAndData(SendsAlongAxes):
    """All-reduces a buffer as large as a bias in one group of all ranks, along pp and dp_shard at once."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE, DATA_SHARD)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.all_reduce(torch.zeros(BIAS), group=self.group)


@mutant(FaultKind.RESOURCES, on_messages("elements of weights along pp", "zbv"), origin=Origin.MESH)
class GathersABiasOnAllStages(SendsAlongAxes):
    """All-gathers a vector as large as a bias over all stages; the vector is smaller than a module's output."""

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
    """After each batch, broadcasts a buffer as large as one weight over a stage's replicas, which have the weight."""

    axes: ClassVar[tuple[str, ...]] = (DATA_SHARD,)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.broadcast(torch.zeros(self.stage_sizes()[0]), src=self.ranks[0], group=self.group)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of activations along tp"), origin=Origin.MESH)
class ReducesTheInputOfAStageOverTensorRanks(SendsAlongAxes):
    """All-reduces a buffer as large as one micro-batch's inputs over the ranks of tp, which have the same inputs."""

    axes: ClassVar[tuple[str, ...]] = (TENSOR,)

    def send(self, micro_batches: MicroBatches) -> None:
        dist.all_reduce(torch.zeros_like(micro_batches[0][0]), group=self.group)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of gradients along tp", "interleaved"), origin=Origin.MESH)
class ReducesSplitGradientsOverTensorRanks(ReducesBuffers):
    """All-reduces buffers as large as gradients over the ranks of tp, which have different parts of each weight."""

    axes: ClassVar[tuple[str, ...]] = (TENSOR,)


@mutant(FaultKind.RESOURCES, on_tensor_ranks("elements of activations to pp,tp 1,1"), origin=Origin.MESH)
class SendsToAnotherTensorRankOfTheNextStage(SendsAlongAxes):
    """Sends a message from the first stage's first rank to the last stage's last rank, which differs along tp too."""

    axes: ClassVar[tuple[str, ...]] = (PIPELINE, TENSOR)

    def send(self, micro_batches: MicroBatches) -> None:
        first, *_, last = self.ranks
        if dist.get_rank() == first:
            dist.send(torch.zeros(4), last)
        elif dist.get_rank() == last:
            dist.recv(torch.zeros(4), first)
