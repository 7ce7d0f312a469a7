"""From the reduced gradients of scaled losses to those that the optimizer gets: finite, unscaled and clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.comm import Comm
from zharness.reference.config import Settings
from zharness.reference.gradients import Gradients
from zharness.reference.loss_scale import LossScale
from zharness.reference.precision import OnOverflow


class Rescaling:
    """One look at the gradients of a step, and one factor on them. ``norm`` is the last step's, unscaled, unclipped.

    Gradients are looked at where something needs their norm: clipping, a loss scale, a precision that skips steps.
    Elsewhere only the losses that the engine saw are, and a gradient that is not finite does what it does in torch.
    """

    def __init__(
        self, settings: Settings, scale: LossScale, gradients: Gradients, comm: Comm, device: torch.device
    ) -> None:
        self.norm: float | None = None
        self._clip = settings.clip
        self._skips = settings.precision.on_overflow is OnOverflow.SKIP
        self._scale = scale
        self._gradients = gradients
        self._comm = comm
        self._device = device
        self._losses: list[Tensor] = []

    def see(self, loss: Tensor) -> None:
        """Remember a loss of this step, to be looked at at the boundary."""
        if not self._skips:
            self._losses.append(loss.detach())

    def forget(self) -> None:
        self._losses.clear()

    def rescale(self, reduced: Mapping[str, Tensor]) -> bool:
        """Unscale and clip ``reduced`` in place; False, with nothing done, where any rank's is not finite. Collective.

        Clips as torch.nn.utils.clip_grad_norm_ does: to a norm of at most ``gradient_clipping``.
        """
        finite, self.norm, factor = self._skips or self._losses_are_finite(), None, 1.0 / self._scale.value
        if self._clip is not None or self._skips or self._scale.needed():
            self.norm = self._gradients.norm() / self._scale.value
            finite = finite and math.isfinite(self.norm)
        if self._clip is not None and self.norm is not None:
            factor *= min(1.0, self._clip / (self.norm + 1e-6))
        if finite and factor != 1.0:
            for grad in reduced.values():
                grad.mul_(factor)
        return finite

    def _losses_are_finite(self) -> bool:
        """Whether every loss of this step is finite, on every rank. Collective: one byte."""
        seen = [loss.isfinite().all() for loss in self._losses]
        wrong = (~torch.stack(seen)).any() if seen else torch.zeros((), dtype=torch.bool, device=self._device)
        return not self._comm.all_reduce(wrong.to(torch.uint8), op=dist.ReduceOp.MAX)
