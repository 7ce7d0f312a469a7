"""A model in which precision matters: layers that torch.autocast lowers beside others, buffers, a frozen parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zharness.workload.nets import FEATURES, OUTPUTS

HIDDEN = 11


def pass_through(hidden: Tensor) -> Tensor:
    """The first layer's output as it is, through which a check may put something of its own."""
    return hidden


class MixedPrecisionModel(nn.Module):
    """Linear layers, one in a block that leaves torch.autocast, and a layer norm: (batch, 12) to (batch, 5).

    ``through`` is called on the first layer's output.

    What is frozen, and the buffers, are cast where they are used, as a model has to whose parameters may be lowered.
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

    def forward(self, x: Tensor, through: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        hidden = nn.functional.gelu(self.norm(through(self.first(x))))
        hidden = hidden * self.gain.to(hidden.dtype) + self.shift.to(hidden.dtype)
        with torch.autocast(x.device.type, enabled=False):
            hidden = torch.tanh(self.inner(hidden.to(x.dtype)))
        return self.last(hidden)  # type: ignore[no-any-return]
