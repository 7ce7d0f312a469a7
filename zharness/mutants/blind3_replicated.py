"""Bugs over torch's own engines: DDP (stage 0), ZeroRedundancyOptimizer (1) and FSDP2 (2 and 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import ddp, fsdp2, zero1
from zharness.engines.protocol import Engine, EngineConfig, Reduction
from zharness.engines.torch_engine import TorchEngine


def failed_no_sync_stays_off(model: nn.Module, config: EngineConfig) -> Engine:
    """DDP: ``no_sync`` turns reduction on again after its block, but not in a ``finally``.

    After an exception inside the block that the caller caught, no backward is ever reduced: the ranks drift apart.
    """
    made = ddp.factory(model, config)
    wrapped: Any = made._adapter.forward.__self__  # type: ignore[attr-defined]

    @contextmanager
    def off() -> Iterator[None]:
        before, wrapped.require_backward_grad_sync = wrapped.require_backward_grad_sync, False
        yield
        wrapped.require_backward_grad_sync = before

    made._adapter = replace(made._adapter, no_sync=off)
    return made


class _Zeroes(TorchEngine):
    def zero_grad(self) -> None:
        self._seen = 0
        self._optimizer.zero_grad(set_to_none=False)
        self._adapter.drop_gradients()


def zero_grad_leaves_zeros(model: nn.Module, config: EngineConfig) -> Engine:
    """DDP: ``zero_grad`` fills gradients with zeros and keeps them.

    A parameter that was used once and is used by no rank later has a gradient of zeros in place of none, and momentum,
    Adam's moments or weight decay go on moving it.
    """
    # DDP alone refuses a loss that does not use all parameters.
    made = ddp.factory(model, replace(config, options={**config.options, "find_unused_parameters": True}))
    made.__class__ = _Zeroes
    return made


class _BackwardUnderAutocast(TorchEngine):
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with self._autocast():
            super().backward(loss, retain_graph=retain_graph)


def backward_under_autocast(model: nn.Module, config: EngineConfig) -> Engine:
    """DDP: ``backward`` runs under the torch.autocast of the forward.

    The backward of whatever the model or the loss computed in fp32 outside of autocast is computed in the low dtype,
    and ``scale(loss).backward()`` gives other gradients than ``backward(loss)``.
    """
    made = ddp.factory(model, config)
    made.__class__ = _BackwardUnderAutocast
    return made


def schedule_moves_first_group(model: nn.Module, config: EngineConfig) -> Engine:
    """ZeroRedundancyOptimizer: of the exposed parameter groups only the first is copied to the local optimizer.

    A schedule moves the learning rate that is shown of every group, and that which is used of the first alone.
    """
    made = zero1.factory(model, config)
    optimizer: Any = made._optimizer
    sync = optimizer._sync_param_groups

    def sync_first(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        if target is optimizer.optim.param_groups:
            source, target = source[:1], target[:1]
        sync(source, target)

    optimizer._sync_param_groups = sync_first
    return made


class _FirstRanksState(TorchEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        if dist.get_rank():
            self._optimizer.optim.state.clear()  # type: ignore[attr-defined]


def load_keeps_first_ranks_state(model: nn.Module, config: EngineConfig) -> Engine:
    """ZeroRedundancyOptimizer: a checkpoint has the optimizer state of rank 0's parameters alone.

    After ``load`` momentum, moments and step counts of all parameters that other ranks update start from nothing.
    """
    made = zero1.factory(model, config)
    made.__class__ = _FirstRanksState
    return made


def zero_grad_misses_no_sync(model: nn.Module, config: EngineConfig) -> Engine:
    """FSDP2: ``zero_grad`` forgets the reduced shards, and not what ``no_sync`` accumulated on the gathered weights.

    The next reduced backward adds the micro-batches that were to be forgotten.
    """
    made = fsdp2.factory(model, config)
    reset, _unreduced = made._adapter.drop_gradients.args  # type: ignore[attr-defined]
    made._adapter = replace(made._adapter, drop_gradients=reset)
    return made


def sum_in_root_alone(model: nn.Module, config: EngineConfig) -> Engine:
    """FSDP2: for a sum over ranks the divisor is set on the root's group, and the call does not recurse.

    The parameters of all other groups get the mean.
    """
    made = fsdp2.factory(model, config)
    if config.reduction is Reduction.SUM:
        for module in model.modules():
            if module is not model and fsdp2.is_sharded(module):
                module.set_gradient_divide_factor(float(dist.get_world_size()))  # type: ignore[operator]
    return made


class _DrawsWhenSaving(TorchEngine):
    def save(self, path: Path) -> None:
        self._nonce = int(torch.randint(1 << 30, ()))  # tells the parts of one save from those of another
        super().save(path)


def save_draws_a_number(model: nn.Module, config: EngineConfig) -> Engine:
    """FSDP2: ``save`` takes a number from torch's global generator to tell one checkpoint from another.

    A training with saves has other dropout masks, and other numbers, than the same training without.
    """
    made = fsdp2.factory(model, config)
    made.__class__ = _DrawsWhenSaving
    return made
