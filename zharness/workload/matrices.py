"""Define the model ``matrices``, whose gradients have at most one element in each row and column that is not zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 14, 9  # of the tall weight, and columns and rows of the wide one
# By the number of a sample's place: a column of a weight, and the only row that is not zero in this column's gradient.
TALL_COLUMN, TALL_ROW = torch.arange(COLUMNS), (5 * torch.arange(COLUMNS) + 3) % ROWS
WIDE_COLUMN, WIDE_ROW = (3 * torch.arange(COLUMNS)) % ROWS, (2 * torch.arange(COLUMNS) + 1) % COLUMNS
# The input of a micro-batch's first sample, beside which the others are so small that Newton-Schulz barely enlarges
# them to a tenth of it: they show the norm that divided them, where the large ones end near 1 whatever it was.
LARGE = 2.0**11
TARGET = 12.0  # such that the mean over four samples, and over three ranks, is an integer


class Matrices(nn.Module):
    """A tall and a wide matrix, each applied to its own part of the input.

    The input has ``COLUMNS + ROWS`` columns. The output has the ``ROWS`` columns of the tall matrix, then the
    ``COLUMNS`` columns of the wide one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(COLUMNS, ROWS, bias=False)
        self.wide = nn.Linear(ROWS, COLUMNS, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the products of both matrices, side by side."""
        return torch.cat([self.tall(inputs[:, :COLUMNS]), self.wide(inputs[:, COLUMNS:])], dim=1)


def draw_places(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets with one element in each row of each part that is not zero.

    Each sample draws a place in each matrix, an input of 1 or 2 (the first ``LARGE`` times that) and a target's sign.
    Two samples of one place have the same column and the same row, on every rank, so that their gradients add up.
    """
    inputs, target = (torch.zeros(samples, COLUMNS + ROWS) for _ in range(2))
    rows = torch.arange(samples)
    for column, row, shift, out_shift in (
        (TALL_COLUMN, TALL_ROW, 0, 0),
        (WIDE_COLUMN, WIDE_ROW, COLUMNS, ROWS),
    ):
        place = torch.randint(COLUMNS, (samples,), generator=generator)
        sizes = torch.randint(1, 3, (samples,), generator=generator).float()
        sizes[0] *= LARGE
        inputs[rows, shift + column[place]] = sizes
        signs = 2 * torch.randint(2, (samples,), generator=generator).float() - 1
        target[rows, out_shift + row[place]] = TARGET * signs
    return inputs, target
