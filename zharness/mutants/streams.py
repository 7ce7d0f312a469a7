"""Mutants that do not wait: for a collective, for a stream, or before they reuse memory.

Their collectives run in a group of the backend ``staged``. This backend delivers results only to a caller that waits,
and fills outputs with NaN until then, so that a missing wait shows at once, also on a CPU. Mutants of streams are
broken on a GPU only. They delay the stream for which they do not wait, so that they fail in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.comm import ALL_GATHER, Comm
from zharness.engines import EngineConfig
from zharness.mutants.mutant import SHARDED_STAGES, FaultKind, Origin, Target, mutant
from zharness.mutants.seams_streams import delay_current_stream, replace_comm, warm_stream
from zharness.mutants.wrapper import DDPWrapper, EngineWrapper
from zharness.parity import Part

GPU = "cuda"


class BrokenCollectives(EngineWrapper):
    """The base class of mutants that run their collectives by the class ``broken``."""

    broken: ClassVar[type[Comm]]

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        replace_comm(self.base, type(self).broken)


class UnawaitedGather(Comm):
    """Does not wait for an all-gather."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Tensor:
        ALL_GATHER(full, shard, group=self.group, async_op=True)
        return full


class UnawaitedReduceScatter(Comm):
    """Does not wait for a reduce-scatter."""

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(shard, full, group=self.group, async_op=True)
        return shard


class UnawaitedAllReduce(Comm):
    """Does not wait for an all-reduce of floats."""

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        if not tensor.is_floating_point():
            work.wait()
        return tensor


class EarlyReadOfGather(Comm):
    """Reads the output of an all-gather before it waits, and returns what it read."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Tensor:
        work = ALL_GATHER(full, shard, group=self.group, async_op=True)
        read = full.clone()
        work.wait()
        return full.copy_(read)


class EarlyReuseOfGradients(Comm):
    """Clears the gradients for the next micro-batch before their reduce-scatter has ended."""

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        work = dist.reduce_scatter_tensor(shard, full, group=self.group, async_op=True)
        full.zero_()
        work.wait()
        return shard


class LateReduceOnAnotherStream(Comm):
    """Reduces on a second stream, which does not wait for the stream that computes the gradients."""

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        side, late = warm_stream(full), torch.zeros_like(full)
        delay_current_stream()
        late.copy_(full)
        with torch.cuda.stream(side):
            super().reduce_scatter(shard, late)
        torch.cuda.synchronize()
        return shard


class WaitOnAnotherStream(Comm):
    """Waits for an all-gather on a second stream, and reads the output on the first."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Tensor:
        side, read = warm_stream(full), torch.zeros_like(full)
        work = ALL_GATHER(full, shard, group=self.group, async_op=True)
        with torch.cuda.stream(side):
            delay_current_stream()
            work.wait()
        read.copy_(full)
        torch.cuda.synchronize()
        return full.copy_(read)


class EarlyFreeOfGradients(Comm):
    """Frees the gradients while a second stream still copies them, so that the first stream gets their memory again."""

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Tensor:
        side, freed = warm_stream(full), full.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            delay_current_stream()
            late = freed.clone()
        del freed
        reused = torch.zeros_like(full)
        torch.cuda.current_stream().wait_stream(side)
        del reused
        return super().reduce_scatter(shard, late)


@mutant(
    FaultKind.STALE,
    Target("training.grads", Part.FORWARD, stage=3),
    Target("double_backward.gradient_penalty", None, model="blocks", stage=3, cause="is not finite"),
    origin=Origin.STREAMS,
)
class ReadsGatherWithoutWait(BrokenCollectives):
    """Computes with gathered weights without waiting for the all-gather."""

    stages = (3,)
    broken = UnawaitedGather


@mutant(FaultKind.STALE, Target("training.grads", stage=2), Target("training.grads", stage=3), origin=Origin.STREAMS)
class ReadsReduceScatterWithoutWait(BrokenCollectives):
    """Steps with reduced gradients without waiting for the reduce-scatter."""

    stages = (2, 3)
    broken = UnawaitedReduceScatter


@mutant(
    FaultKind.STALE,
    Target("training.clip_and_norm", None, stage=1, cause="norm nan"),
    Target("training.clip_and_norm", None, stage=3, cause="norm nan"),
    origin=Origin.STREAMS,
)
class ReadsNormWithoutWait(BrokenCollectives):
    """Clips by a norm without waiting for the all-reduce of its parts."""

    stages = SHARDED_STAGES
    broken = UnawaitedAllReduce


@mutant(FaultKind.STALE, Target("training.grads", Part.FORWARD, stage=3), origin=Origin.STREAMS)
class ReadsGatherBeforeWait(BrokenCollectives):
    """Copies gathered weights before it waits for the all-gather."""

    stages = (3,)
    broken = EarlyReadOfGather


@mutant(
    FaultKind.STALE,
    Target("training.grads", None, stage=2, cause="was overwritten before the collective was waited for"),
    origin=Origin.STREAMS,
)
class OverwritesGradientsBeforeWait(BrokenCollectives):
    """Clears gradients while their reduce-scatter reads them."""

    stages = (2,)
    broken = EarlyReuseOfGradients


@mutant(FaultKind.STALE, Target("training.grads", stage=2), origin=Origin.STREAMS, device=GPU)
class ReducesBeforeGradientsAreComputed(BrokenCollectives):
    """Reduces on a stream that does not wait for the stream that computes the gradients."""

    stages = (2,)
    broken = LateReduceOnAnotherStream


@mutant(FaultKind.STALE, Target("training.grads", stage=3), origin=Origin.STREAMS, device=GPU)
class ReadsOnAStreamThatDidNotWait(BrokenCollectives):
    """Waits for the all-gather on one stream and computes with its output on another."""

    stages = (3,)
    broken = WaitOnAnotherStream


@mutant(FaultKind.STALE, Target("training.grads", stage=2), origin=Origin.STREAMS, device=GPU)
class FreesGradientsBeforeTheyAreRead(BrokenCollectives):
    """Frees gradients without Tensor.record_stream while another stream reads them."""

    stages = (2,)
    broken = EarlyFreeOfGradients


@mutant(FaultKind.STALE, Target("training.grads"), origin=Origin.STREAMS, device=GPU)
class ReadsHostCopyBeforeItIsThere(EngineWrapper):
    """Reads gradients from pinned host memory without waiting for the copy from the GPU."""

    def full_grads(self) -> Mapping[str, Tensor]:
        copies = {}
        for name, grad in self.base.full_grads().items():
            on_gpu = grad.to(GPU)
            delay_current_stream()
            pinned = torch.zeros(grad.shape, dtype=grad.dtype, pin_memory=True)
            copies[name] = pinned.copy_(on_gpu, non_blocking=True).clone()
        return copies


@mutant(FaultKind.STALE, Target("training.grads"), origin=Origin.STREAMS, device=GPU)
class ReadsGradientsOnTheHostStream(EngineWrapper):
    """Copies gradients to the host on a stream that does not wait for the backward."""

    def full_grads(self) -> Mapping[str, Tensor]:
        copies = {}
        for name, grad in self.base.full_grads().items():
            on_gpu = grad.to(GPU)
            side, late = warm_stream(on_gpu), torch.zeros_like(on_gpu)
            delay_current_stream()
            late.copy_(on_gpu)
            with torch.cuda.stream(side):
                copies[name] = late.cpu()
            torch.cuda.synchronize()
        return copies


@mutant(
    FaultKind.STALE,
    Target("training.trajectory", Part.OPTIMIZER, variant="sgd"),
    origin=Origin.STREAMS,
    device=GPU,
)
class ClipsBeforeNormIsComputed(DDPWrapper):
    """Multiplies gradients by a factor that another stream is still computing."""

    def step(self) -> None:
        factor = torch.zeros((), device=GPU)
        side = warm_stream(factor)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            delay_current_stream()
            factor.fill_(1.0)
        for parameter in self.parameters_with_grad():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        torch.cuda.synchronize()
        super().step()
