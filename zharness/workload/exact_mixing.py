"""Define an exact model whose middle layers mix the samples of a micro-batch, as a token-mixing layer mixes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_blocks import HIDDEN, make_ternary
from zharness.workload.exact_mlp import WIDTH

MIXED = 6
TENSOR_SPLIT: Mapping[str, Any] = {
    "tp_plan": {"up": "colwise", "down": "rowwise"},
    "tp_parts": {"mixed samples": MIXED},
}


class MixingModel(nn.Module):
    """A model whose layer ``up`` has a transposed input, so that the gradient of this input is not contiguous.

    The model maps (``samples``, 16) to (``samples``, 16).
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(samples, MIXED)
        self.down = nn.Linear(MIXED, samples)
        self.last = nn.Linear(HIDDEN, WIDTH)
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        mixed = self.down(torch.relu(self.up(hidden.t())))
        output: Tensor = self.last(mixed.t())
        return output
