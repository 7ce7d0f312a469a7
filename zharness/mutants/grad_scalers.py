"""Mutants of callers who use torch.amp.GradScaler wrongly beside DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zharness.engines import EngineConfig, ddp, fsdp1, fsdp2
from zharness.engines.loss_scaling import CallersGradScaler
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams_engines, seams_scalers
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant_factory
from zharness.parity import Part

LAW, MODEL = "precision.grad_scaler", "mixed"


class _ClipsFirst(TorchEngine):
    """A TorchEngine that clips before it unscales."""

    def step(self) -> None:
        limit = seams_engines.clip_limit(self)
        if limit is not None:
            seams_engines.set_grad_norm(self, self.clip_gradients(limit))
        with seams_engines.without_clipping(self):
            super().step()


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target(LAW, Part.REDUCTION, model=MODEL, variant="autocast_clipped", parameter="norm"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.PRECISION,
)
def ddp_clips_scaled_gradients(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clips gradients before ``unscale_``; torch's examples of GradScaler warn of this order."""
    engine = ddp.factory(model, config)
    engine.__class__ = _ClipsFirst
    return engine


class _UnsavedScaler(CallersGradScaler):
    """A loss scaler whose state a checkpoint does not keep."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target(LAW, Part.OPTIMIZER, model=MODEL, variant="autocast_resumed", parameter="loss"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.PRECISION,
)
def ddp_saves_no_loss_scale(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Saves checkpoints without the state of the GradScaler, so that a resumed training begins at the initial scale."""
    engine = ddp.factory(model, config)
    seams_scalers.set_scaler_class(engine, _UnsavedScaler)
    return engine


class _StepsPastTheScaler(TorchEngine):
    """A TorchEngine that calls the optimizer's step directly, instead of the scaler's step."""

    def step(self) -> None:
        seams_engines.optimizer(self).step()


class _StepsTheSchedule(TorchEngine):
    """A TorchEngine whose schedule advances even after a step that was skipped."""

    def step(self) -> None:
        before = self.observe().skipped_steps
        super().step()
        if self.observe().skipped_steps != before:
            seams_engines.schedule(self).step()


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target(LAW, Part.OPTIMIZER, model=MODEL, variant="autocast", parameter="learning rate*"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.PRECISION,
)
def fsdp2_schedules_skipped_steps(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Advances the learning-rate schedule after every ``scaler.step``, even if the optimizer's step was skipped."""
    engine = fsdp2.factory(model, config)
    engine.__class__ = _StepsTheSchedule
    return engine


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target(LAW, None, model=MODEL, variant="autocast", cause="has different values for step"),
    wraps="fsdp1",
    stages=(2, 3),
    origin=Origin.PRECISION,
)
def fsdp1_scales_on_each_rank(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Uses torch.amp.GradScaler instead of ShardedGradScaler: a rank skips a step only if its own shards overflow."""
    engine = fsdp1.factory(model, config)
    seams_scalers.set_grad_scaler(engine, torch.amp.GradScaler)
    return engine


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target(LAW, Part.OPTIMIZER, model=MODEL, variant="autocast", parameter="loss"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.PRECISION,
)
def fsdp2_scales_on_each_rank(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Unscales and checks this rank's shards alone, so that ranks disagree on an overflow in one shard."""
    engine = fsdp2.factory(model, config)
    seams_scalers.set_grad_scaler(engine, seams_scalers.ScalerOfShards)
    return engine


@mutant_factory(
    FaultKind.LOSS_SCALE,
    Target("training.sgd_step", Part.OPTIMIZER, dtype="fp16"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.PRECISION,
)
def fsdp2_steps_with_scaled_gradients(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Steps with the gradients of the scaled loss in fp16: it calls the optimizer's step instead of the scaler's."""
    engine = fsdp2.factory(model, config)
    engine.__class__ = _StepsPastTheScaler
    return engine
