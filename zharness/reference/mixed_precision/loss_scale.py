"""Scale the loss in fp16 by a factor that keeps small gradients above underflow, and adapt that factor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness import torch_private as private
from zharness.errors import NonFiniteError, UsageError
from zharness.reference.torch_func import torch_fallback

GROWTH_FACTOR = 2.0


@dataclass(frozen=True)
class LossScaleConfig:
    """The rules by which the loss scale changes.

    The rules are those of ``torch.amp.GradScaler`` with growth_factor 2 and backoff_factor 0.5: ``growth_interval``
    steps without overflow double the scale, and None means a static scale. DeepSpeed adds two settings. An overflow at
    the scale ``min_scale`` is an error. Of ``hysteresis`` overflows only the last one halves the scale; their count
    restarts when the scale grows, or with ``consecutive_hysteresis`` at every step without overflow.
    """

    initial_scale: float
    growth_interval: int | None
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 0.0


class LossScale:
    """The loss scale of one engine, with hooks on the parameters that refuse the backward of an unscaled loss.

    A scale that was set by ``override`` has precedence over the configured scale, and is changed only by the caller.
    """

    def __init__(self, config: LossScaleConfig | None, parameters: Iterable[nn.Parameter]) -> None:
        self._config = config
        self._scale = 1.0 if config is None else config.initial_scale
        self._external_scale: float | None = None
        self._good_steps = 0
        self._remaining_hysteresis = 1 if config is None else config.hysteresis
        self._scaled_graph_task_id: int | None = None
        self._hooks: list[RemovableHandle] = []
        if config is not None:
            self._hooks = [self._register_hook(p) for p in parameters if p.is_floating_point()]

    @property
    def value(self) -> float:
        """The number by which the gradients of a scaled loss must be divided, or 1.0 if no scale is needed."""
        return self._scale if self._external_scale is None else self._external_scale

    def is_needed(self) -> bool:
        """Return whether a loss must be scaled before its backward."""
        return self._config is not None or self._external_scale is not None

    def override(self, scale: float | None) -> None:
        """Set the loss scale to ``scale``; None restores the configured scale.

        Raises UsageError unless ``scale`` is positive and finite.
        """
        if scale is not None and not 0 < scale < math.inf:
            raise UsageError(f"the external loss scale is {scale!r}; expected a positive, finite number, or None")
        self._external_scale = scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale; a half-precision loss becomes float32, as with GradScaler.scale."""
        if not self.is_needed():
            return loss
        scaled = loss * torch.tensor(self.value, dtype=torch.float32, device=loss.device)
        if scaled.requires_grad:
            scaled.register_hook(self._mark_scaled_backward)  # type: ignore[no-untyped-call]
        return scaled

    def _mark_scaled_backward(self, grad: Tensor) -> None:
        """Record that the running backward, and those of reentrant checkpoints inside it, belong to a scaled loss."""
        task = private.current_graph_task_id()
        if task != -1 and task == self._scaled_graph_task_id:
            return
        outer_task, self._scaled_graph_task_id = self._scaled_graph_task_id, task

        def restore_outer_task() -> None:
            self._scaled_graph_task_id = outer_task

        torch_fallback.call_after_backward(restore_outer_task)

    def _register_hook(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register on ``parameter`` the hook that refuses an unscaled loss, and return the hook's handle.

        A frozen parameter gets the hook too, since it may be trained later. torch accepts the hook only while
        ``requires_grad`` is True.
        """
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._refuse_unscaled)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(requires_grad)
        return handle

    def is_missing(self) -> bool:
        """Return whether the running backward belongs to a loss without the configured loss scale."""
        return self._config is not None and self._external_scale is None and self._scaled_graph_task_id is None

    def _refuse_unscaled(self, parameter: nn.Parameter) -> None:
        """Raise UsageError if the running backward belongs to an unscaled loss. This is a hook of every parameter."""
        if self.is_missing():
            raise UsageError(
                "a backward reached the parameters without the loss scale that fp16 needs: call engine.backward(loss) "
                "or engine.scale(loss).backward(); for out.backward(g), engine.scale((out * g).sum()).backward(). "
                "Call zero_grad() first, because this backward has left gradients in the parameters"
            )

    def forget_scaled_backward(self) -> None:
        """Discard the record that a scaled backward is running, which remains if that backward raised an error."""
        self._scaled_graph_task_id = None

    def update(self, overflow: bool) -> None:
        """Update the loss scale after a step; ``overflow`` is True if a gradient of any rank was not finite.

        Raises NonFiniteError on every rank for an overflow at the smallest configured scale.
        """
        config = self._config
        if config is None or config.growth_interval is None or self._external_scale is not None:
            return
        if overflow:
            self._good_steps = 0
            self._back_off(config)
            return
        self._good_steps += 1
        if config.consecutive_hysteresis:
            self._remaining_hysteresis = config.hysteresis
        if self._good_steps == config.growth_interval:
            self._good_steps, self._remaining_hysteresis = 0, config.hysteresis
            if self._scale * GROWTH_FACTOR <= torch.finfo(torch.float32).max:
                self._scale *= GROWTH_FACTOR

    def _back_off(self, config: LossScaleConfig) -> None:
        """Halve the scale after an overflow, unless ``hysteresis`` allows more overflows."""
        if self._remaining_hysteresis > 1:
            self._remaining_hysteresis -= 1
            return
        if self._scale <= config.min_scale:
            raise NonFiniteError(
                f"the gradients overflow at the smallest loss scale, {self._scale:g} (fp16.min_loss_scale); the step "
                "was skipped on every rank: lower the learning rate, look for a NaN in the data, or use bf16"
            )
        self._scale = max(self._scale / GROWTH_FACTOR, config.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed training continues with the same loss scales."""
        return {"scale": self._scale, "good_steps": self._good_steps, "patience": self._remaining_hysteresis}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which an earlier ``state_dict()`` returned."""
        self._scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self._remaining_hysteresis = int(state["patience"])

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()
