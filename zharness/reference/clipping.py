"""From the reduced gradients of scaled losses to those that the optimizer gets: finite, unscaled and clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.gradients import Gradients
from zharness.reference.loss_scale import LossScale
from zharness.reference.precision import OnOverflow


class GradientClipper:
    """One look at the gradients of a step, and one factor on them. ``norm`` is the last step's, unscaled, unclipped.

    It is None where nothing needs it: clipping, a loss scale, a precision that skips steps.
    """

    def __init__(self, settings: Settings, loss_scale: LossScale, gradients: Gradients) -> None:
        self.norm: float | None = None
        self._max_norm = settings.max_grad_norm
        self._skips_on_overflow = settings.precision.on_overflow is OnOverflow.SKIP
        self._loss_scale = loss_scale
        self._gradients = gradients

    def unscale_and_clip(self, reduced_grads: Mapping[str, Tensor]) -> bool:
        """Unscale and clip ``reduced`` in place; False, with nothing done, where any rank's is not finite. Collective.

        Clips as torch.nn.utils.clip_grad_norm_ does: to a norm of at most ``gradient_clipping``.
        """
        self.norm, factor = None, 1.0 / self._loss_scale.value
        if self._max_norm is not None or self._skips_on_overflow or self._loss_scale.is_needed():
            self.norm = self._gradients.norm() / self._loss_scale.value
        finite = self._gradients.is_finite() if self.norm is None else math.isfinite(self.norm)
        if self._max_norm is not None and self.norm is not None:
            factor *= min(1.0, self._max_norm / (self.norm + 1e-6))
        if finite and factor != 1.0:
            for grad in reduced_grads.values():
                grad.mul_(factor)
        return finite
