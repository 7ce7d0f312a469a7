"""Mutants that round float64 values to float32: gradients, or the values that a caller writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def round_wide(value: Tensor) -> Tensor:
    """Return ``value`` rounded to float32 if it is a float64 tensor."""
    return value.float().double() if value.dtype is torch.float64 else value


@mutant(
    FaultKind.OPTIMIZER,
    Target("access.write_param", Part.GATHER, model="similar", variant="float64", parameter="third*"),
    Target("access.write_state", Part.OPTIMIZER, model="similar", variant="adam_float64", parameter="third*"),
    origin=Origin.BLIND_11,
)
class WritesWideValuesRounded(EngineWrapper):
    """Rounds the values that the caller writes to a float64 weight, or to its optimizer state, to float32."""

    def write_param(self, name: str, value: Tensor) -> None:
        self.base.write_param(name, round_wide(value))

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self.base.write_optimizer_state(name, key, round_wide(value))


@mutant(
    FaultKind.CLIPPING,
    Target("training.clip_wide", Part.OPTIMIZER, parameter="second*"),
    origin=Origin.BLIND_11,
)
class ClipsWideGradientsInFloat32(EngineWrapper):
    """Multiplies a float64 gradient by the clip factor in float32."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(unscale_and_clip: Callable[..., bool]) -> Callable[..., bool]:
            def clip_in_float32(reduced: dict[str, Tensor], *args: Any) -> bool:
                is_finite = unscale_and_clip(reduced, *args)
                for grad in reduced.values():
                    grad.copy_(round_wide(grad))
                return is_finite

            return clip_in_float32

        if config.clip is not None:
            seams.wrap_unscale_and_clip(self.base, wrap)


def average_in_float32(bucket: Any) -> torch.futures.Future[Tensor]:
    """Return the mean over ranks of a bucket of DDP, computed in float32 if the bucket is float64.

    ``bucket`` is a torch.distributed.GradBucket, which torch's type hints do not have.
    """
    buffer: Tensor = bucket.buffer()
    sent = buffer.float() if buffer.dtype is torch.float64 else buffer
    dist.all_reduce(sent)
    mean = sent.div_(dist.get_world_size()).to(buffer.dtype)
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(mean)
    return averaged


@mutant(
    FaultKind.REDUCE_DTYPE,
    Target("training.clip_wide", Part.REDUCTION, parameter="second*"),
    origin=Origin.BLIND_12,
)
class SendsWideGradientsInFloat32(EngineWrapper):
    """Reduces the gradients of float64 weights in float32."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        # DDP refuses a hook whose annotations are strings, and all annotations of this file are strings.
        seams_engines.ddp_wrapper(self.base).register_comm_hook(None, lambda _state, bucket: average_in_float32(bucket))
