"""The loss scale of fp16: what a loss is multiplied by so that small gradients do not vanish, and when it moves."""

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

GROWTH_FACTOR = 2.0


@dataclass(frozen=True)
class LossScaleConfig:
    """How a loss scale moves: as ``torch.amp.GradScaler``'s does, with growth_factor 2 and backoff_factor 0.5.

    ``window`` steps without overflow double it (its growth_interval); None keeps it as it is (static). DeepSpeed adds a
    ``minimum``, below which training is given up, and a ``hysteresis``: of that many overflows only the last one halves
    the scale. They are counted anew when the scale grows, with ``consecutive`` at every step without overflow.
    """

    initial_scale: float
    growth_interval: int | None
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 0.0


class LossScale:
    """The scale that losses need now, and the watch that no gradient arrives without it.

    An external scale (``override``) takes precedence over the engine's own, and is moved by its owner alone.
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
        """What the gradients of a scaled loss have to be divided by; 1.0 where none is needed."""
        return self._scale if self._external_scale is None else self._external_scale

    def is_needed(self) -> bool:
        """Whether a backward without the scale would be wrong."""
        return self._config is not None or self._external_scale is not None

    def override(self, scale: float | None) -> None:
        """Take an external scale, or give it back with None. Raises UsageError unless it is positive and finite."""
        if scale is not None and not 0 < scale < math.inf:
            raise UsageError(f"the external loss scale is {scale!r}; expected a positive, finite number, or None")
        self._external_scale = scale

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; a half-precision scalar comes out in float32, as from GradScaler.scale."""
        if not self.is_needed():
            return loss
        scaled = loss * torch.tensor(self.value, dtype=torch.float32, device=loss.device)
        if scaled.requires_grad:
            scaled.register_hook(self._mark_scaled_backward)  # type: ignore[no-untyped-call]
        return scaled

    def _mark_scaled_backward(self, grad: Tensor) -> None:
        """The backward that is running now is of a scaled loss, and so are those that it starts (checkpoints)."""
        task = private.current_graph_task_id()
        if task != -1 and task == self._scaled_graph_task_id:
            return
        before, self._scaled_graph_task_id = self._scaled_graph_task_id, task

        def leave() -> None:
            self._scaled_graph_task_id = before

        if private.can_queue_callback():
            private.queue_backward_callback(leave)

    def _register_hook(self, parameter: nn.Parameter) -> RemovableHandle:
        """A frozen one as well, since it may be trained later; torch takes hooks of those that want gradients alone."""
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._refuse_unscaled)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(wanted)
        return handle

    def _refuse_unscaled(self, parameter: nn.Parameter) -> None:
        if self._external_scale is None and self._scaled_graph_task_id is None:
            raise UsageError(
                "a backward reached the parameters without the loss scale that fp16 needs: call engine.backward(loss) "
                "or engine.scale(loss).backward(); for out.backward(g), engine.scale((out * g).sum()).backward(). "
                "Then zero_grad(), since this backward left gradients behind"
            )

    def forget_scaled_backward(self) -> None:
        """No scaled backward is running (one that raised does not end by itself)."""
        self._scaled_graph_task_id = None

    def update(self, overflow: bool) -> None:
        """After a step's gradients were seen on all ranks: overflow anywhere, or none.

        Raises NonFiniteError, on every rank alike, for an overflow at the smallest scale that is configured.
        """
        how = self._config
        if how is None or how.growth_interval is None or self._external_scale is not None:
            return
        if overflow:
            self._good_steps = 0
            self._back_off(how)
            return
        self._good_steps += 1
        if how.consecutive_hysteresis:
            self._remaining_hysteresis = how.hysteresis
        if self._good_steps == how.growth_interval:
            self._good_steps, self._remaining_hysteresis = 0, how.hysteresis
            if self._scale * GROWTH_FACTOR <= torch.finfo(torch.float32).max:
                self._scale *= GROWTH_FACTOR

    def _back_off(self, config: LossScaleConfig) -> None:
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
        """What a resumed training needs to go on with the same scales."""
        return {"scale": self._scale, "good_steps": self._good_steps, "patience": self._remaining_hysteresis}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self._scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self._remaining_hysteresis = int(state["patience"])

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
