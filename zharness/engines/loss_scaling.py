"""Scale losses of torch's engines by torch.amp.GradScaler, as a caller who follows torch's examples of fp16 does.

The pattern is that of https://docs.pytorch.org/docs/stable/notes/amp_examples.html: scale the loss, unscale the
gradients, clip them, step, and update the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.device import compute_device_type
from zharness.engines.protocol import Absent, EngineConfig

BuildScaler = Callable[..., torch.amp.GradScaler]


class LossScaler(Protocol):
    """The operations of an engine on a loss and its gradients that depend on the loss scale."""

    @property
    def skipped_steps(self) -> int | Absent:
        """The number of steps that were skipped because gradients overflowed."""

    def read_scale(self) -> float | Absent:
        """Return the current loss scale."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward starts."""

    def unscale(self, gradient: Tensor) -> Tensor:
        """Return a gradient divided by the loss scale, in float32; without a loss scale, return it unchanged."""

    def rescale(self, gradient: Tensor) -> Tensor:
        """Return an unscaled gradient multiplied by the loss scale, as ``.grad`` has it before the step."""

    def unscale_in_place(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients before they are clipped. If this method is not called, ``step`` unscales them."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make the optimizer's step unless gradients overflowed, and return whether it was made."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that ``state_dict`` returned."""


class NoLossScale:
    """The LossScaler of engines whose losses are not scaled: every step is made."""

    skipped_steps = Absent("this engine never skips a step")

    def read_scale(self) -> Absent:
        return Absent("losses are not scaled")

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, gradient: Tensor) -> Tensor:
        return gradient

    def rescale(self, gradient: Tensor) -> Tensor:
        return gradient

    def unscale_in_place(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class CallersGradScaler:
    """The LossScaler of a caller with a GradScaler; a static scale is restored after every step."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device, static_scale: float | None) -> None:
        self.skipped_steps = 0
        self._scaler = scaler
        self._static_scale = static_scale
        # GradScaler makes its scale at the first scaled loss. A step may come earlier, because gradients can be
        # written.
        self._scaler.scale(torch.zeros((), device=device))

    def read_scale(self) -> float:
        return float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def unscale(self, gradient: Tensor) -> Tensor:
        return gradient.float() / self.read_scale()

    def rescale(self, gradient: Tensor) -> Tensor:
        return gradient * self.read_scale()

    def unscale_in_place(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.read_scale()
        # Without gradients GradScaler.step raises "No inf checks were recorded". A ShardedGradScaler asks the other
        # ranks, even on a rank whose shards have no elements.
        if type(self._scaler) is torch.amp.GradScaler and not has_gradients(optimizer):
            optimizer.step()
            self._scaler.update(before)
            return True
        self._scaler.step(optimizer)
        self._scaler.update()
        is_made = self.read_scale() >= before
        if self._static_scale is not None:
            self._scaler.update(self._static_scale)
        self.skipped_steps += not is_made
        return is_made

    def state_dict(self) -> dict[str, Any]:
        return {**self._scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(dict(state))
        self.skipped_steps = int(state["skipped_steps"])


class Progress:
    """The learning-rate schedule and the loss scale of a training, as a checkpoint saves them."""

    def __init__(self, schedule: torch.optim.lr_scheduler.LambdaLR, scaler: LossScaler) -> None:
        self._schedule = schedule
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, with the state of the loss scale under ``loss_scale`` if there is one."""
        scale = self._scaler.state_dict()
        return {**self._schedule.state_dict(), **({"loss_scale": scale} if scale else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that ``state_dict`` returned; without a loss scale in it, keep the current one."""
        self._schedule.load_state_dict({key: value for key, value in state.items() if key != "loss_scale"})
        if "loss_scale" in state:
            self._scaler.load_state_dict(state["loss_scale"])


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of ``optimizer`` has a gradient."""
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def build_loss_scaler(config: EngineConfig, autocast_dtype: torch.dtype | None, build: BuildScaler) -> LossScaler:
    """Return the loss scaler of ``config``, made by ``build``, which is GradScaler or a subclass.

    For a model in fp16 the scale is static. Under torch.autocast in fp16 GradScaler changes the scale. The scale is on
    the compute device, where losses are, because offloaded shards are on the CPU.
    """
    device = torch.device(compute_device_type())
    if config.dtype == "fp16":
        return CallersGradScaler(build(device.type, init_scale=config.loss_scale), device, config.loss_scale)
    if autocast_dtype is torch.float16:
        return CallersGradScaler(build(device.type), device, None)
    return NoLossScale()


def build_sharded_scaler(device_type: str, **rules: Any) -> torch.amp.GradScaler:
    """Return the GradScaler of FSDP1, which lets every rank skip a step if the shards of one rank overflowed."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # The default argument is the group that existed when the class was imported.
    return ShardedGradScaler(device_type, process_group=dist.group.WORLD, **rules)
