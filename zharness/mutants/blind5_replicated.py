"""Nine bugs over DDP, ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import ddp, fsdp2, zero1
from zharness.engines.protocol import EngineConfig, Reduction
from zharness.engines.torch_engine import TorchEngine, do_nothing


def no_sync_left_by_exception(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """``no_sync`` turns the reduction on again only where its block ends without an exception.

    Wrong: after an exception in the block that the caller handles, gradients are never reduced again, in silence.
    """
    made = ddp.factory(model, config)
    wrapped: Any = made._adapter.no_sync.__self__  # type: ignore[attr-defined]

    @contextmanager
    def off() -> Iterator[None]:
        before = wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = False
        yield
        wrapped.require_backward_grad_sync = before

    made._adapter = replace(made._adapter, no_sync=off)
    return made


class _Zeros(TorchEngine):
    def zero_grad(self) -> None:
        self._seen = 0
        self._optimizer.zero_grad(set_to_none=False)
        self._adapter.drop_gradients()


def zeros_for_none(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """``zero_grad`` fills gradients with zeros in place of dropping them.

    Wrong: a parameter that a step did not use, but one before did, is still moved by momentum and weight decay, and
    ``full_grads`` names it.
    """
    # DDP alone refuses a loss that does not use all parameters.
    made = ddp.factory(model, replace(config, options={**config.options, "find_unused_parameters": True}))
    made.__class__ = _Zeros
    return made


class _Samples(TorchEngine):
    def step(self) -> None:
        super().step()
        if float(torch.rand(())) < 0.01:  # telemetry of one step in a hundred
            self.sampled = tuple(group["lr"] for group in self._optimizer.param_groups)


def draws_in_step(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Each step draws a number from torch's global generator, to decide whether it is one to be logged.

    Wrong: the dropout masks of all later steps are others than in plain PyTorch from the same seed.
    """
    made = ddp.factory(model, config)
    made.__class__ = _Samples
    return made


class _ModuleByModule(TorchEngine):
    def step(self) -> None:
        if self._clip is None:
            super().step()
            return
        held = [param for module in self.module.modules() for param in module.parameters(recurse=False)]
        self._last_grad_norm = float(torch.nn.utils.clip_grad_norm_(held, self._clip))
        self._optimizer.step()
        self._schedule.step()
        self._seen = 0


def tied_clipped_twice(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clipping goes through the parameters module by module.

    Wrong: a tied weight is in the norm twice, and its gradient is multiplied by the clipping factor twice.
    """
    made = zero1.factory(model, config)
    made.__class__ = _ModuleByModule
    return made


def schedule_of_the_outer_optimizer(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """The schedule moves the learning rates of the sharded optimizer, which never tells the one inside that updates.

    Wrong: all steps are made with the first learning rate, while ``observe`` tells the scheduled one.
    """
    made = zero1.factory(model, config)
    sharded: Any = made._optimizer
    sharded._sync_param_groups = lambda *_: None
    return made


class _KeepsOutputs(TorchEngine):
    outputs: list[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        self.outputs.append(output)
        return output


def keeps_outputs(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """The output of every forward, with its graph, is kept until ``close``, for metrics that nobody asks for.

    Wrong: memory grows with each micro-batch; the graph of a forward without backward is never freed.
    """
    made = zero1.factory(model, config)
    made.__class__ = _KeepsOutputs
    cast(_KeepsOutputs, made).outputs = []
    return made


def unreduced_survive_zero_grad(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """``zero_grad`` drops the gradients of the shards, and not those that ``no_sync`` left on the gathered weights.

    Wrong: the next backward adds what the caller asked to forget.
    """
    made = fsdp2.factory(model, config)
    made._adapter = replace(made._adapter, drop_gradients=do_nothing)
    return made


def sum_but_in_the_root(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Asked for the sum over ranks, it sets the divisor of every group below the root, and forgets the root's own.

    Wrong: gradients of parameters in the root's group are averaged, and all others summed.
    """
    made = fsdp2.factory(model, config)
    if config.reduction is Reduction.SUM:
        cast(Any, model).set_gradient_divide_factor(float(dist.get_world_size()))
    return made


def masters_rounded_by_step(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under bf16 each step leaves the fp32 shards rounded to bf16, as an optimizer over bf16 weights would.

    Wrong: the masters are promised in fp32; updates below the spacing of bf16 are lost instead of adding up.
    """
    from torch.distributed.tensor import DTensor

    made = fsdp2.factory(model, config)
    if config.dtype != "bf16":
        return made
    params = list(made._adapter.params.values())

    @torch.no_grad()
    def rounded(*_: Any) -> None:
        for param in params:
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(local.to(torch.bfloat16))

    made._optimizer.register_step_post_hook(rounded)
    return made
