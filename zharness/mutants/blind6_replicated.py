"""Seven bugs over DDP, FSDP2 and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from zharness.engines import ddp, fsdp2, zero1
from zharness.engines.protocol import EngineConfig
from zharness.engines.torch_engine import TorchEngine


def same_mask_in_every_forward(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """DDP: the random state is put back after every forward.

    Dropout draws the same mask in every micro-batch and step, where plain PyTorch draws new ones. Needs dropout.
    """

    class Forking(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                return super().__call__(*args, **kwargs)

    engine = ddp.factory(model, config)
    engine.__class__ = Forking
    return engine


def outputs_are_kept(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """DDP: every output of a forward with gradients is kept for statistics, with its graph, until ``close``.

    Memory grows with each micro-batch, and what a forward without backward saved is never freed.
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


def clips_by_the_shards_norm(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """FSDP2: each rank clips by the norm of its own shards, as if they were the whole.

    The norm is too small and differs from rank to rank, and parts of one parameter are scaled by different factors.
    """

    class Local(TorchEngine):
        def step(self) -> None:
            limit, self._clip = self._clip, None
            if limit is not None:
                shards = [p.grad for p in self._adapter.params.values() if p.grad is not None]
                local = [cast("Any", g).to_local() if hasattr(g, "to_local") else g for g in shards]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in local]))
                for gradient in local:
                    gradient.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
                self._last_grad_norm = float(norm)
            super().step()
            self._clip = limit

    engine = fsdp2.factory(model, config)
    engine.__class__ = Local
    return engine


def eval_leaves_weights_gathered(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """FSDP2, stage 3: a forward under no_grad leaves all weights gathered, to save the next forward's gather.

    They take the whole model's memory, and the next forward after a step, a load or an edit still computes with them.
    """

    class Lazy(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            if not torch.is_grad_enabled() and config.stage == 3:
                for module in self.module.modules():
                    if fsdp2.is_sharded(module):
                        cast("Any", module).unshard()
            return output

    engine = fsdp2.factory(model, config)
    engine.__class__ = Lazy
    return engine


def users_autocast_is_switched_off(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """FSDP2: without the torch_autocast option the forward runs under a disabled autocast, whatever the user's says.

    ``with torch.autocast(...): engine(x)`` computes in fp32, where plain PyTorch computes in bf16.
    """

    class Sealed(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if config.options.get("torch_autocast", {}).get("enabled"):
                return super().__call__(*args, **kwargs)
            with torch.autocast(next(self.module.parameters()).device.type, enabled=False):
                return super().__call__(*args, **kwargs)

    engine = fsdp2.factory(model, config)
    engine.__class__ = Sealed
    return engine


def no_sync_outlives_an_exception(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """FSDP2: ``no_sync`` has no finally, so an exception that leaves it leaves synchronisation off.

    A caller that skips a bad micro-batch (a forward that raises) trains on without reducing anything, in silence.
    """
    engine = fsdp2.factory(model, config)
    sync = cast("Any", engine._adapter.no_sync).__self__

    @contextmanager
    def off() -> Iterator[None]:
        sync._unreduced += 1
        sync._switch(False)
        yield
        sync._switch(True)

    engine._adapter = replace(engine._adapter, no_sync=off)
    return engine


def schedule_stays_outside(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """ZeRO-1: a change of the groups' settings reaches the optimizer that the engine shows, not the one that updates.

    ``observe`` tells the scheduled learning rates, and every step is made with those of the construction.
    """
    engine = zero1.factory(model, config)
    optimizer = cast("Any", engine._optimizer)
    copy = optimizer._sync_param_groups

    def outwards(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        if target is not optimizer.optim.param_groups:
            copy(source, target)

    optimizer._sync_param_groups = outwards
    return engine
