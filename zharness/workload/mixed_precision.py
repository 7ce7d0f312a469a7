"""Define a model for mixed precision: it has layers that autocast runs in fp32, buffers and a frozen parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.workload.nets import FEATURES, OUTPUTS

HIDDEN = 11


def pass_through(hidden: Tensor) -> Tensor:
    """Return ``hidden``. This function is the default of ``transform``, an argument of MixedPrecisionModel."""
    return hidden


class MixedPrecisionModel(nn.Module):
    """A model of linear layers and a layer norm, in which one linear layer runs with torch.autocast disabled.

    The model maps (batch, 12) to (batch, 5). The forward applies the function ``transform`` to the first layer's
    output. The forward casts the frozen parameter and the buffers to the dtype of the activations, because the
    parameters may be in low precision.
    """

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.gain = nn.Parameter(torch.rand(HIDDEN) + 0.5, requires_grad=False)
        self.register_buffer("shift", torch.randn(HIDDEN))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        return self.last(self.run_inner(self.run_norm(x, transform), x.dtype))  # type: ignore[no-any-return]

    def run_norm(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        """Return the activations after the first layer, ``transform`` and the layer norm."""
        return nn.functional.gelu(self.norm(transform(self.first(x))))

    def run_inner(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the activations after the layer ``inner``, which runs in ``dtype`` with torch.autocast disabled."""
        hidden = hidden * self.gain.to(hidden.dtype) + self.shift.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.tanh(self.inner(hidden.to(dtype)))


class RecomputedMixedPrecisionModel(MixedPrecisionModel):
    """MixedPrecisionModel, whose backward recomputes the first layer, and the last one by reentrant checkpointing."""

    def forward(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        hidden = checkpoint(self.run_norm, x, transform, use_reentrant=False)
        hidden = self.run_inner(hidden, x.dtype)
        return checkpoint(self.last, hidden, use_reentrant=True)  # type: ignore[no-any-return]
