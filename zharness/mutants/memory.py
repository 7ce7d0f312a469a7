"""Mutants that use more memory, or send more bytes, than their stage should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    ddp,
    zero1,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_stage3
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.RESOURCES,
    Target("resources.memory_per_rank", Part.GATHER, parameter="optimizer_state"),
    Target("resources.memory_per_rank", Part.GATHER, parameter="optimizer_state", world_size=4, mesh="rep2"),
    origin=Origin.RESOURCES,
)
class HoldsTheStateTwice(EngineWrapper):
    """Keeps a second copy of the optimizer's first moments."""

    def step(self) -> None:
        self.base.step()
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["spare"] = state["exp_avg"].clone()


@mutant(
    FaultKind.RESOURCES,
    Target("resources.memory_per_rank", Part.GATHER, parameter="gradients"),
    origin=Origin.RESOURCES,
)
class HoldsGradientsWhole(EngineWrapper):
    """At stage 2, keeps every full gradient in addition to this rank's shard of the gradient."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(reduced: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
            return lambda: [*reduced(), *(torch.zeros_like(parameter) for parameter in model.parameters())]

        seams.wrap_reduced_tensors(self.base, wrap)


@mutant(FaultKind.RESOURCES, Target("resources.comm_volume", parameter="sent"), origin=Origin.RESOURCES)
class SendsTwice(EngineWrapper):
    """All-reduces as many additional elements as the model has in each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for parameter in self.module.parameters():
            seams.comm(self.base).all_reduce(torch.zeros_like(parameter))


@mutant(FaultKind.RESOURCES, Target("resources.gathered_bytes", Part.GATHER, parameter="rest"), origin=Origin.RESOURCES)
class StaysGathered(EngineWrapper):
    """Keeps one parameter unsharded at all times."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept = next(iter(model.parameters())).detach().clone()
        seams.count_unsharded(self.base, self.kept)


@mutant(FaultKind.RESOURCES, Target("resources.gathered_bytes", Part.GATHER, parameter="peak"), origin=Origin.RESOURCES)
class GathersUntilBackward(EngineWrapper):
    """Keeps parameters unsharded from the forward until the end of the backward."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: list[Any] = []

        def wrap(unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
            def unshard_and_keep(value: Any) -> Any:
                self.kept.append(unshard(value))
                return self.kept[-1]

            return unshard_and_keep

        seams_stage3.wrap_unshard(self.base, wrap)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.kept.clear()


@mutant(
    FaultKind.RESOURCES,
    Target("resources.memory_per_rank", Part.GATHER, parameter="parameters behind a forward"),
    origin=Origin.ONLOOKERS,
)
class StaysGatheredUntilBackward(EngineWrapper):
    """At stage 3, keeps FSDP2's parameters unsharded from forward to backward, as stage 2 does."""

    wraps = "fsdp2"
    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in model.modules():
            switch: Any = getattr(module, "set_reshard_after_forward", None)
            if switch is not None:
                switch(False, recurse=False)


@mutant(FaultKind.RESOURCES, Target("resources.no_leak", Part.GATHER), origin=Origin.RESOURCES)
class LeavesTensorsBehind(EngineWrapper):
    """Keeps one tensor in memory for every engine that was closed in this process."""

    behind: ClassVar[list[Tensor]] = []

    def close(self) -> None:
        self.behind.append(torch.zeros(()))
        self.base.close()


@mutant(
    FaultKind.RESOURCES,
    Target("backward.engine_backward", Part.LOCAL_GRADIENT, model="blocks", parameter="refused"),
    origin=Origin.ONLOOKERS,
)
class AlwaysRetains(EngineWrapper):
    """Retains the graph of every backward, so that its activations are kept until the next backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=True)


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.memory_per_rank", Part.GATHER, parameter="gradients"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_4,
)
def gradients_in_whole_buffer(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, returns a reduced shard as a slice of a buffer for the whole bucket, so the buffer is kept.

    All values are right, but gradients use as many bytes as the whole model on each rank, which stage 2 should avoid.
    """
    engine = seams.build(model, config)
    comm = seams.comm(engine)

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_into_buffer(bucket: seams.Bucket) -> list[Tensor]:
            row = bucket.pack_shards(reduce(bucket))
            flat = row.new_empty(comm.world_size * row.numel())
            own = flat[comm.rank * row.numel() :][: row.numel()].copy_(row)
            return bucket.split_shards(own, comm.rank)

        return reduce_into_buffer

    if config.stage == 2:
        seams.wrap_reduce_bucket(engine, wrap)
    return engine


class _KeepsOutputs(TorchEngine):
    outputs: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        self.outputs.append(output)
        return output


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.no_leak", Part.GATHER, parameter="tensors"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_5,
)
def keeps_outputs(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Keeps the output of every forward, with its graph, until ``close``, as if to compute metrics.

    Memory grows with each micro-batch, and the graph of a forward without backward is never freed.
    """
    made = zero1.factory(model, config)
    made.__class__ = _KeepsOutputs
    cast(_KeepsOutputs, made).outputs = []
    return made


@mutant_factory(
    FaultKind.RESOURCES,
    Target("resources.no_leak", Part.GATHER, parameter="tensors"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_6,
)
def outputs_are_kept(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Keeps the output of every DDP forward with gradients, with its graph, until ``close``, as if for statistics.

    Memory grows with each micro-batch, and the activations that a forward without backward saved are never freed.
    """
    history: list[Any] = []

    class Keeping(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            if torch.is_grad_enabled():
                history.append(output)
            return output

        def close(self) -> None:
            history.clear()
            super().close()

    engine = ddp.factory(model, config)
    engine.__class__ = Keeping
    return engine


@mutant_factory(
    FaultKind.RESOURCES,
    Target(
        "checkpointing.whole_model", Part.GATHER, model="blocks", variant="non_reentrant", parameter="gathered_bytes"
    ),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_3,
)
def failed_forward_stays_open(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, treats a forward that has raised as still running, because a ``finally`` is missing.

    After an exception that the caller caught, the unsharded weights are never freed, and a read of a weight outside a
    forward returns the value from before the exception, even after later steps.
    """
    engine = seams.build(model, config)
    seams_stage3.leave_failed_forwards_open(engine)
    return engine


@mutant_factory(
    FaultKind.RESOURCES,
    Target(
        "checkpointing.whole_model", Part.GATHER, model="blocks", variant="non_reentrant", parameter="gathered_bytes"
    ),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_5,
)
def forward_left_by_exception(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, does not end the forwards of modules after an exception.

    The weights that these modules had unsharded stay unsharded through ``zero_grad`` and all later steps.
    """
    engine = seams.build(model, config)
    seams_stage3.leave_failed_forwards_open(engine)
    return engine
