"""Nine bugs over DDP, FSDP2 and ZeroRedundancyOptimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import ddp, fsdp2, zero1
from zharness.engines.protocol import Engine, EngineConfig
from zharness.engines.torch_engine import TorchEngine


def ddp_no_sync_left_by_exception(model: nn.Module, config: EngineConfig) -> Engine:
    """``no_sync`` has no ``finally``: after an exception inside it, no backward is ever reduced again.

    The caller who drops the bad micro-batch, calls zero_grad and goes on trains every rank for itself, in silence.
    """
    engine = ddp.factory(model, config)
    wrapped: Any = engine._adapter.forward.__self__  # type: ignore[attr-defined]

    @contextmanager
    def no_sync() -> Iterator[None]:
        before = wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = False
        yield
        wrapped.require_backward_grad_sync = before

    engine._adapter = replace(engine._adapter, no_sync=no_sync)
    return engine


def ddp_wire_in_bf16(model: nn.Module, config: EngineConfig) -> Engine:
    """DDP's bf16 compression of gradients is on although nobody asked for it.

    ``EngineConfig.dtype`` is the dtype "of parameters, gradients and wire": of an fp32 training it rounds every reduced
    gradient to eight bits.
    """
    engine = ddp.factory(model, config)
    wrapped: Any = engine._adapter.forward.__self__  # type: ignore[attr-defined]

    def compress(_state, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        low = buffer.to(torch.bfloat16).div_(dist.get_world_size())
        return dist.all_reduce(low, async_op=True).get_future().then(lambda done: buffer.copy_(done.value()[0]))

    wrapped.register_comm_hook(None, compress)
    return engine


def ddp_clips_each_group(model: nn.Module, config: EngineConfig) -> Engine:
    """Clips each parameter group by that group's own norm; ``clip`` is a limit of the global norm.

    The norm that it reports is the global one, and with one group nothing is wrong.
    """

    class Clips(TorchEngine):
        def step(self) -> None:
            limit = self._clip
            if limit is not None:
                groups = [group["params"] for group in self._optimizer.param_groups]
                norms = [float(nn.utils.clip_grad_norm_(group, limit)) for group in groups]
                self._clip = None
            try:
                super().step()
            finally:
                self._clip = limit
            if limit is not None:
                self._last_grad_norm = math.sqrt(sum(norm**2 for norm in norms))

    engine = ddp.factory(model, config)
    engine.__class__ = Clips
    return engine


def fsdp2_keeps_unreduced(model: nn.Module, config: EngineConfig) -> Engine:
    """``zero_grad`` zeroes the shards' gradients alone: those that ``no_sync`` left on the gathered weights stay.

    "Forget every gradient accumulated so far, wherever the engine keeps it": the next reduced backward adds them.
    """
    engine = fsdp2.factory(model, config)
    reset = engine._adapter.drop_gradients.args[0]  # type: ignore[attr-defined]
    engine._adapter = replace(engine._adapter, drop_gradients=reset)
    return engine


def fsdp2_base_rates_after_load(model: nn.Module, config: EngineConfig) -> Engine:
    """After ``load`` the schedule takes the learning rates that it finds, decayed ones, for the initial ones.

    So from the second step after it on, what was decayed before the save is decayed twice.
    """

    class Loads(TorchEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            self._schedule.base_lrs = [float(group["lr"]) for group in self._optimizer.param_groups]

    engine = fsdp2.factory(model, config)
    engine.__class__ = Loads
    return engine


def fsdp2_norm_of_own_shards(model: nn.Module, config: EngineConfig) -> Engine:
    """``grad_norm`` is that of this rank's shards (``to_local`` of each gradient), another on every rank.

    Clipping is right; what is logged, and what a caller decides by, is not "the global norm before clipping".
    """

    class Reports(TorchEngine):
        def step(self) -> None:
            from torch.distributed.tensor import DTensor

            grads = [param.grad for param in self._adapter.params.values() if param.grad is not None]
            shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            own = math.sqrt(sum(float(shard.square().sum()) for shard in shards))
            super().step()
            if self._clip is not None:
                self._last_grad_norm = own

    engine = fsdp2.factory(model, config)
    engine.__class__ = Reports
    return engine


def fsdp2_autocast_only_with_grad(model: nn.Module, config: EngineConfig) -> Engine:
    """The option torch_autocast is "every forward under torch.autocast"; under no_grad forwards run in fp32.

    Evaluation is then of another function than the one that was trained, in another dtype.
    """
    engine = fsdp2.factory(model, config)
    configured = engine._autocast

    def autocast() -> AbstractContextManager[Any]:
        return configured() if torch.is_grad_enabled() else nullcontext()

    engine._autocast = autocast
    return engine


def zero1_rate_of_last_step(model: nn.Module, config: EngineConfig) -> Engine:
    """The sharded optimizer's own groups learn of a new learning rate after the step for which it was meant.

    A schedule so lags by one step, while ``observe`` tells the rates that the schedule asked for.
    """
    engine = zero1.factory(model, config)
    local: Any = engine._optimizer.optim  # type: ignore[attr-defined]
    known = [group["lr"] for group in engine._optimizer.param_groups]
    update = local.step

    def step(*args: Any, **kwargs: Any) -> Any:
        asked = [group["lr"] for group in local.param_groups]
        for group, rate in zip(local.param_groups, known, strict=True):
            group["lr"] = rate
        try:
            return update(*args, **kwargs)
        finally:
            for group, rate in zip(local.param_groups, asked, strict=True):
                group["lr"] = rate
            known[:] = asked

    local.step = step
    return engine


def zero1_seeds_all_ranks(model: nn.Module, config: EngineConfig) -> Engine:
    """``step`` seeds torch's generator with the number of the step, "so that ranks stay together".

    Every rank then draws the same dropout masks, of which the caller's own seed decides nothing any more.
    """

    class Seeds(TorchEngine):
        made = 0

        def step(self) -> None:
            super().step()
            self.made += 1
            torch.manual_seed(self.made)

    engine = zero1.factory(model, config)
    engine.__class__ = Seeds
    return engine
