"""Define an exact model with running statistics and dropout, whose layers tp may split."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.workload.exact_blocks import make_ternary
from zharness.workload.mixed_precision import draw_integers
from zharness.workload.nets import StatefulModel

TENSOR_PLAN = {"first": "colwise_gather_output", "last": "rowwise_split_input"}


class ExactStatefulModel(StatefulModel):
    """The model ``StatefulModel`` with integers; only activations that batch norm makes positive pass.

    The statistics of integers are exact in any order of the samples. The rounded output of batch norm only decides
    which activations pass, so the inputs of the last layer are integers, too; dropout doubles them. It maps (batch, 12)
    to (batch, 5).
    """

    def __init__(self) -> None:
        super().__init__()
        make_ternary(self)
        self.norm = nn.BatchNorm1d(self.first.out_features, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        passes = self.norm(hidden.detach()) > 0
        return self.last(self.dropout(hidden * passes))  # type: ignore[no-any-return]


def draw_seeded_integers(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Draw inputs and targets in {-1, 0, 1}, and a seed for the dropout in the forward."""
    return *draw_integers(samples, generator), int(torch.randint(1 << 30, (), generator=generator))
