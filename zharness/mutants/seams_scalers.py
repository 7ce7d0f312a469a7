"""Define how mutants replace the GradScaler of torch's engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zharness.device import compute_device_type
from zharness.engines.loss_scaling import CallersGradScaler
from zharness.engines.torch_engine import TorchEngine


def set_scaler_class(engine: TorchEngine, scaler: type[CallersGradScaler]) -> None:
    """Change the class of the engine's loss scaler to ``scaler``, if the engine has a GradScaler."""
    if isinstance(engine._scaler, CallersGradScaler):
        engine._scaler.__class__ = scaler


def set_grad_scaler(engine: TorchEngine, build: Callable[..., torch.amp.GradScaler]) -> None:
    """Replace the engine's GradScaler by a new one with the same scale, if the engine has a GradScaler."""
    if isinstance(engine._scaler, CallersGradScaler):
        original = engine._scaler._scaler
        device = torch.device(compute_device_type())
        scaler = build(device.type, init_scale=original.get_scale())
        engine._scaler = CallersGradScaler(scaler, device, engine._scaler._static_scale)


class ScalerOfShards(torch.amp.GradScaler):
    """A GradScaler that unscales and checks the local tensors of DTensors, and communicates with no other rank."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        del allow_fp16
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        local = [getattr(grad, "_local_tensor", grad) for grad in grads]
        torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inv_scale)
        return {found_inf.device: found_inf}
