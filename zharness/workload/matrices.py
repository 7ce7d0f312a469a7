"""Define models of two matrices whose momentum Newton-Schulz orthogonalizes without rounding a sum.

The gradients of the model ``matrices`` have at most one nonzero element in each row and column. The gradients of
``dense_matrices`` have no zero, and their columns or rows are orthogonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_mlp import linear_loss

ROWS, COLUMNS = 14, 9  # of the tall weight
# Of the wide weight. The wide weight is larger than the tall weight, so that two ranks that each own half of all
# elements share the wide weight.
WIDE_ROWS, WIDE_COLUMNS = 9, 16
# For each place that a sample may draw: a column of a weight, and the only nonzero row in this column's gradient.
TALL_COLUMN, TALL_ROW = torch.arange(COLUMNS), (5 * torch.arange(COLUMNS) + 3) % ROWS
WIDE_COLUMN, WIDE_ROW = (3 * torch.arange(WIDE_ROWS)) % WIDE_COLUMNS, (2 * torch.arange(WIDE_ROWS) + 1) % WIDE_ROWS
# The input of a micro-batch's first sample. All other inputs are so much smaller that Newton-Schulz enlarges their
# elements only to about a tenth of the large ones. So the small elements show the norm by which they were divided,
# while the large elements end near 1 for any norm.
LARGE = 2.0**11
TENSOR_PLAN = {"tall": "colwise_gather_output", "wide": "colwise_gather_output"}
TARGET = 12.0  # such that the mean over four samples, and over three ranks, is an integer


class Matrices(nn.Module):
    """A tall and a wide matrix, each applied to its own part of the input.

    The input has ``COLUMNS + WIDE_COLUMNS`` columns. The output has the ``ROWS`` columns of the tall matrix, then the
    ``WIDE_ROWS`` columns of the wide one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(COLUMNS, ROWS, bias=False)
        self.wide = nn.Linear(WIDE_COLUMNS, WIDE_ROWS, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the products of both matrices, side by side."""
        return torch.cat([self.tall(inputs[:, :COLUMNS]), self.wide(inputs[:, COLUMNS:])], dim=1)


def draw_places(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets with one nonzero element in each row of each part.

    Each sample draws a place in each matrix, an input of 1 or 2 (the first ``LARGE`` times that) and a target's sign.
    Samples with the same place have the same column and the same row, on every rank, so that their gradients add up.
    """
    inputs, target = torch.zeros(samples, COLUMNS + WIDE_COLUMNS), torch.zeros(samples, ROWS + WIDE_ROWS)
    rows = torch.arange(samples)
    for column, row, shift, out_shift in (
        (TALL_COLUMN, TALL_ROW, 0, 0),
        (WIDE_COLUMN, WIDE_ROW, COLUMNS, ROWS),
    ):
        place = torch.randint(len(column), (samples,), generator=generator)
        sizes = torch.randint(1, 3, (samples,), generator=generator).float()
        sizes[0] *= LARGE
        inputs[rows, shift + column[place]] = sizes
        signs = 2 * torch.randint(2, (samples,), generator=generator).float() - 1
        target[rows, out_shift + row[place]] = TARGET * signs
    return inputs, target


SIGNS = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
VECTORS = len(SIGNS)  # columns of the tall weight and rows of the wide one
# Repetitions of ``SIGNS`` in the tall and in the wide weight. Shards of the tall weight have 12, 8 or 6 rows. The
# product of two columns of a shard is 0, 2 or -2 times one number. So the sum of these products over ranks is 0 in any
# order, even if each product is rounded.
TALL_COPIES, WIDE_COPIES = 6, 5


class SignedVectors(nn.Module):
    """A weight whose gradient is ``SIGNS`` repeated, with each column (in a wide weight: each row) times a factor."""

    def __init__(self, copies: int, is_wide: bool) -> None:
        super().__init__()
        self._is_wide = is_wide
        self._copies = copies
        size = copies * VECTORS
        weight = torch.empty(VECTORS, size) if is_wide else torch.empty(size, VECTORS)
        self.weight = nn.Parameter(nn.init.uniform_(weight, -1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return, for each sample, the sum of each column (row) times its signs, times the sample's input."""
        weight = self.weight.T if self._is_wide else self.weight
        signs = SIGNS.repeat(self._copies, 1).to(weight.device, weight.dtype)
        return inputs * (weight * signs).sum(dim=0)


class DenseMatrices(nn.Module):
    """A tall and a wide matrix, each applied to its own ``VECTORS`` columns of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = SignedVectors(TALL_COPIES, is_wide=False)
        self.wide = SignedVectors(WIDE_COPIES, is_wide=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of both matrices, side by side."""
        return torch.cat([self.tall(inputs[:, :VECTORS]), self.wide(inputs[:, VECTORS:])], dim=1)


def draw_factors(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs of 1 or 2 and one target, so that the factors of gradients are integers.

    The factor of one vector of each matrix is ``LARGE`` times as large.
    """
    inputs = torch.randint(1, 3, (samples, 2 * VECTORS), generator=generator).float()
    inputs[:, [1, VECTORS + 2]] *= LARGE
    return inputs, torch.full_like(inputs, TARGET)


# The draw function and the fields of ModelSpec of each model.
MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        draw_places,
        {
            "name": "matrices",
            "summary": (
                "a tall and a wide matrix whose gradients have one element in a row and column: Muon rounds no sum"
            ),
            "build": Matrices,
            "loss": linear_loss,
            "tp_plan": TENSOR_PLAN,
        },
    ),
    (
        draw_factors,
        {
            "name": "dense_matrices",
            "summary": "a tall and a wide matrix whose gradients have no zero and orthogonal vectors: no sum rounds",
            "build": DenseMatrices,
            "loss": linear_loss,
        },
    ),
)
