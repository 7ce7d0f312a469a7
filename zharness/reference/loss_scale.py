"""The loss scale of fp16: what a loss is multiplied by so that small gradients do not vanish, and when it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness.errors import NonFiniteError, UsageError
from zharness.reference import torch_private as private

GROWTH = 2.0


@dataclass(frozen=True)
class Scaling:
    """How a loss scale moves: as ``torch.amp.GradScaler``'s does, with growth_factor 2 and backoff_factor 0.5.

    ``window`` steps without overflow double it (its growth_interval); None keeps it as it is (static). DeepSpeed adds a
    ``minimum``, below which training is given up, and a ``hysteresis``: of that many overflows only the last one halves
    the scale. They are counted anew when the scale grows, with ``consecutive`` at every step without overflow.
    """

    initial: float
    window: int | None
    hysteresis: int = 1
    consecutive: bool = False
    minimum: float = 0.0


class LossScale:
    """The scale that losses need now, and the watch that no gradient arrives without it.

    An external scale (``override``) takes precedence over the engine's own, and is moved by its owner alone.
    """

    def __init__(self, scaling: Scaling | None, parameters: Iterable[nn.Parameter]) -> None:
        self._scaling = scaling
        self._value = 1.0 if scaling is None else scaling.initial
        self._external: float | None = None
        self._good = 0
        self._patience = 1 if scaling is None else scaling.hysteresis
        self._scaled_backward: int | None = None
        self._hooks: list[RemovableHandle] = []
        if scaling is not None:
            self._hooks = [self._watch(p) for p in parameters if p.is_floating_point()]

    @property
    def value(self) -> float:
        """What the gradients of a scaled loss have to be divided by; 1.0 where none is needed."""
        return self._value if self._external is None else self._external

    def needed(self) -> bool:
        """Whether a backward without the scale would be wrong."""
        return self._scaling is not None or self._external is not None

    def override(self, scale: float | None) -> None:
        """Take an external scale, or give it back with None. Raises UsageError unless it is positive and finite."""
        if scale is not None and not 0 < scale < math.inf:
            raise UsageError(f"the external loss scale is {scale!r}; expected a positive, finite number, or None")
        self._external = scale

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; a half-precision scalar comes out in float32, as from GradScaler.scale."""
        if not self.needed():
            return loss
        scaled = loss * torch.tensor(self.value, dtype=torch.float32, device=loss.device)
        if scaled.requires_grad:
            scaled.register_hook(self._enter)  # type: ignore[no-untyped-call]
        return scaled

    def _enter(self, grad: Tensor) -> None:
        """The backward that is running now is of a scaled loss, and so are those that it starts (checkpoints)."""
        task = private.graph_task()
        if task != -1 and task == self._scaled_backward:
            return
        before, self._scaled_backward = self._scaled_backward, task

        def leave() -> None:
            self._scaled_backward = before

        if private.can_queue():
            private.at_end_of_backward(leave)

    def _watch(self, parameter: nn.Parameter) -> RemovableHandle:
        """A frozen one as well, since it may be trained later; torch takes hooks of those that want gradients alone."""
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._refuse_unscaled)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(wanted)
        return handle

    def _refuse_unscaled(self, parameter: nn.Parameter) -> None:
        if self._external is None and self._scaled_backward is None:
            raise UsageError(
                "a backward reached the parameters without the loss scale that fp16 needs: call engine.backward(loss) "
                "or engine.scale(loss).backward(); for out.backward(g), engine.scale((out * g).sum()).backward(). "
                "Then zero_grad(), since this backward left gradients behind"
            )

    def forget(self) -> None:
        """No scaled backward is running (one that raised does not end by itself)."""
        self._scaled_backward = None

    def update(self, overflow: bool) -> None:
        """After a step's gradients were seen on all ranks: overflow anywhere, or none.

        Raises NonFiniteError, on every rank alike, for an overflow at the smallest scale that is configured.
        """
        how = self._scaling
        if how is None or how.window is None or self._external is not None:
            return
        if overflow:
            self._good = 0
            self._back_off(how)
            return
        self._good += 1
        if how.consecutive:
            self._patience = how.hysteresis
        if self._good == how.window:
            self._good, self._patience = 0, how.hysteresis
            if self._value * GROWTH <= torch.finfo(torch.float32).max:
                self._value *= GROWTH

    def _back_off(self, how: Scaling) -> None:
        if self._patience > 1:
            self._patience -= 1
            return
        if self._value <= how.minimum:
            raise NonFiniteError(
                f"the gradients overflow at the smallest loss scale, {self._value:g} (fp16.min_loss_scale); the step "
                "was skipped on every rank: lower the learning rate, look for a NaN in the data, or use bf16"
            )
        self._value = max(self._value / GROWTH, how.minimum)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to go on with the same scales."""
        return {"scale": self._value, "good_steps": self._good, "patience": self._patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self._value, self._good = float(state["scale"]), int(state["good_steps"])
        self._patience = int(state["patience"])

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
