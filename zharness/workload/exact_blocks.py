"""Exact-arithmetic models for the laws of autograd and of parameters: what a caller does with them is up to a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_mlp import WIDTH, random_ternary

HIDDEN = 5
MAX_FACTOR_ELEMENTS = 3  # parameters of up to so many elements scale what others compute

Block = Callable[[Tensor], Tensor]


def call_block(block: Block, hidden: Tensor) -> Tensor:
    """``block(hidden)``: the block as it is, where a check may checkpoint it."""
    return block(hidden)


def first_output(output: Tensor, extra: Tensor) -> Any:
    """The first output alone."""
    return output


class BlocksModel(nn.Module):
    """A layer used twice, a frozen one and a factor: (batch, 16) to (batch, 16), with a second head on the input.

    ``through(block, hidden)`` runs the block, for example under a checkpoint. ``pack(output, extra)`` makes the value
    that is returned; ``extra`` (batch, 3) shares no graph with ``output``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.factor = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.last = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(0.5)  # its factor is 2
        make_ternary(self)

    def block(self, hidden: Tensor) -> Tensor:
        once = torch.relu(self.shared(hidden))
        return torch.relu(self.shared(once)) * self.factor

    def block_with_dropout(self, hidden: Tensor) -> Tensor:
        """The block with half of its result dropped at random."""
        dropped: Tensor = self.dropout(self.block(hidden))
        return dropped

    def forward(
        self,
        x: Tensor,
        through: Callable[[Block, Tensor], Tensor] = call_block,
        pack: Callable[[Tensor, Tensor], Any] = first_output,
        dropping: bool = False,
    ) -> Any:
        hidden = through(self.block_with_dropout if dropping else self.block, self.first(x))
        output = self.last(self.frozen(hidden))
        return output if pack is first_output else pack(output, self.head(x))


class BranchingModel(nn.Module):
    """Parameters whose use may change: (batch, 16) to (batch, 16). ``branch`` says whether the branch is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.tied = nn.Linear(WIDTH, HIDDEN)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.twice = nn.Linear(HIDDEN, HIDDEN)
        self.branch = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.by_attribute = nn.Linear(HIDDEN, WIDTH, bias=False)
        make_ternary(self)

    def hidden(self, x: Tensor, branch: bool) -> Tensor:
        """(batch, 16) to (batch, 5)."""
        hidden = torch.relu(self.first(x) + self.tied(x))
        if branch:
            hidden = hidden + self.branch(hidden)
        return torch.relu(self.twice(torch.relu(self.twice(self.frozen(hidden)))))

    @torch.no_grad()
    def largest_weight(self) -> Tensor:
        """The largest magnitude in a weight that a forward then uses: a statistic, which trains nobody. It is 1."""
        return self.by_attribute.weight.abs().max()

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        largest = self.largest_weight()
        return nn.functional.linear(self.hidden(x, branch), self.by_attribute.weight) * largest


class OddParametersModel(BranchingModel):
    """The same with parameters of every shape, layout and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(WIDTH, HIDDEN).t())
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        make_ternary(self)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        largest, hidden = self.largest_weight(), self.hidden(x, branch)
        output = nn.functional.linear(hidden, self.by_attribute.weight) * largest + hidden @ self.transposed
        mixed = (self.narrow[:2].to(x.dtype) * self.wide[1:].to(x.dtype)).sum()
        return output * self.one + self.scalar + self.empty.sum() + mixed


class LookupModel(nn.Module):
    """A table whose gradient is sparse, and a head: (batch, 16) to (batch, 16). Each row of inputs has rows repeatedly.

    Inputs of -1, 0 and 1 look up a row each, the table has one that none looks up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, HIDDEN, sparse=True)
        self.last = nn.Linear(HIDDEN, WIDTH)
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.table((x + 1).long()).sum(dim=1))
        return output


@torch.no_grad()
def make_ternary(module: nn.Module) -> None:
    """Draw every parameter of ``module`` from {-1, 0, 1}, the smallest ones from {-1, 1}.

    Those are factors: where one is zero, so is every gradient behind it, and a cell would compare zeros with zeros.
    """
    for parameter in module.parameters():
        parameter.copy_(random_ternary(tuple(parameter.shape)))
        if parameter.numel() <= MAX_FACTOR_ELEMENTS:
            parameter.masked_fill_(parameter == 0, 1)
