"""The second blind set, over DDP, FSDP2 and ZeroRedundancyOptimizer: each factory gives an engine with one bug."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import ddp, fsdp2, zero1
from zharness.engines.protocol import Engine, EngineConfig, Piece
from zharness.engines.torch_engine import TorchEngine


def _as(engine: TorchEngine, kind: type[TorchEngine]) -> TorchEngine:
    engine.__class__ = kind
    return engine


def ddp_no_sync_is_left_on(model: nn.Module, config: EngineConfig) -> Engine:
    """``no_sync`` without try and finally: an exception inside the block leaves synchronisation off for good.

    Whoever catches it (an odd batch, out of memory) and goes on trains each rank on its own gradients.
    """
    engine = ddp.factory(model, config)
    wrapped: Any = engine._adapter.forward.__self__  # type: ignore[attr-defined]

    @contextmanager
    def unprotected() -> Iterator[None]:
        before = wrapped.require_backward_grad_sync
        wrapped.require_backward_grad_sync = False
        yield
        wrapped.require_backward_grad_sync = before

    engine._adapter = replace(engine._adapter, no_sync=unprotected)
    return engine


class _ClipsEveryName(TorchEngine):
    def step(self) -> None:
        clip = self._clip
        if clip is not None:
            named = [param for _, param in self.module.named_parameters(remove_duplicate=False)]
            self._last_grad_norm = float(torch.nn.utils.clip_grad_norm_(named, clip))
        self._clip = None
        try:
            super().step()
        finally:
            self._clip = clip


def ddp_clips_tied_twice(model: nn.Module, config: EngineConfig) -> Engine:
    """Clipping goes over every name, so a tied weight counts twice in the norm and is scaled down twice.

    The reported norm is not the gradient's, and the tied weight learns more slowly than the others.
    """
    return _as(ddp.factory(model, config), _ClipsEveryName)


class _OneGenerator(TorchEngine):
    def step(self) -> None:
        super().step()
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


def ddp_synchronises_generators(model: nn.Module, config: EngineConfig) -> Engine:
    """After each step every rank's default generator is set to rank 0's.

    Dropout then draws one mask for all ranks, and the generator that the user seeded for each rank is lost.
    """
    return _as(ddp.factory(model, config), _OneGenerator)


def fsdp2_layout_of_an_even_split(model: nn.Module, config: EngineConfig) -> Engine:
    """``layout`` tells rows ``n*r//N`` to ``n*(r+1)//N``, but ``fully_shard`` cuts as ``torch.chunk`` does.

    Where the ranks do not divide dimension 0, whoever reads "who owns which elements" takes the wrong ones.
    """
    engine = fsdp2.factory(model, config)
    ranks, params = dist.get_world_size(), engine._adapter.params

    def even(shape: tuple[int, ...]) -> tuple[Piece, ...]:
        rows, row = shape[0], 1
        for size in shape[1:]:
            row *= size
        edges = [(rows * rank // ranks * row, rows * (rank + 1) // ranks * row) for rank in range(ranks)]
        return tuple(Piece(rank, start, stop) for rank, (start, stop) in enumerate(edges) if start < stop)

    told = {name: even(tuple(params[name].shape)) for name in engine._adapter.layout}
    engine._adapter = replace(engine._adapter, layout=told)
    return engine


class _ClipsOwnShards(TorchEngine):
    @torch.no_grad()
    def step(self) -> None:
        clip = self._clip
        if clip is not None:
            grads = [p.grad for p in self._adapter.params.values() if p.grad is not None]
            local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
            norm = torch.nn.utils.get_total_norm(local)
            factor = float((clip / (norm + 1e-6)).clamp(max=1.0))
            for grad in local:
                grad.mul_(factor)
            self._last_grad_norm = float(norm)
        self._clip = None
        try:
            super().step()
        finally:
            self._clip = clip


def fsdp2_clips_by_local_norm(model: nn.Module, config: EngineConfig) -> Engine:
    """Clipping takes the norm of this rank's shards for the global one, as a plain clip over shards does.

    Each rank scales by another factor, and ``grad_norm`` is neither the global norm nor alike on all ranks.
    """
    return _as(fsdp2.factory(model, config), _ClipsOwnShards)


class _LoadsParametersOnly(TorchEngine):
    @torch.no_grad()
    def load(self, path: Path) -> None:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        super().load(path)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(before[name])


def fsdp2_load_forgets_buffers(model: nn.Module, config: EngineConfig) -> Engine:
    """``load`` restores parameters, optimizer and schedule, but leaves the buffers as they are.

    A run resumed in a new process evaluates with the fresh running statistics of its batch norms.
    """
    return _as(fsdp2.factory(model, config), _LoadsParametersOnly)


def zero1_stale_rates_of_later_groups(model: nn.Module, config: EngineConfig) -> Engine:
    """The settings of the first parameter group alone reach the optimizer that holds this rank's share.

    The schedule moves the rates that ``observe`` tells; all groups but the first go on with the one they began with.
    """
    engine = zero1.factory(model, config)
    optimizer: Any = engine._optimizer
    sync = optimizer._sync_param_groups

    def first(source: list[dict[Any, Any]], target: list[dict[Any, Any]]) -> None:
        sync(source[:1], target[:1])

    optimizer._sync_param_groups = first
    return engine


class _LoadsOnRank0(TorchEngine):
    def load(self, path: Path) -> None:
        own: Any = self._optimizer.optim  # type: ignore[attr-defined]
        kept = {
            param: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for param, state in own.state.items()
        }
        super().load(path)
        if dist.get_rank() != 0:
            own.state.clear()
            own.state.update(kept)


def zero1_load_fills_rank_0_only(model: nn.Module, config: EngineConfig) -> Engine:
    """``load`` restores the optimizer state that rank 0 owns; the other ranks keep theirs, or none in a new process.

    Their parameters' momenta and step counts begin anew, so training does not continue from the checkpoint.
    """
    return _as(zero1.factory(model, config), _LoadsOnRank0)
