"""Factories of models that raise, end the process, or return what cannot be judged."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def draw(generator: torch.Generator) -> torch.Tensor:
    """Draw a micro-batch."""
    return torch.randn(2, 4, generator=generator)


def on_meta() -> Any:
    """Return a model whose parameters are on the device meta."""
    with torch.device("meta"):
        return nn.Linear(4, 4), draw


def exits() -> Any:
    """End the process, as a script does that finds no licence."""
    sys.exit("no licence")


def raises() -> Any:
    """Raise an error."""
    raise KeyError("weights")


def score(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    """Return the mean square of the outputs."""
    return output.square().mean()


def four_parts() -> Any:
    """Return one part too many."""
    return nn.Linear(4, 4), draw, score, 4


def a_class() -> Any:
    """Return a class in place of a model."""
    return nn.Linear


def batch_without_argument() -> Any:
    """Return a batch function that takes no generator."""
    return nn.Linear(4, 4), lambda: torch.randn(2, 4), score


class CallsTooWide(nn.Module):
    """A model that calls a layer of another width than its inputs have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


def wrong_width() -> Any:
    """Return a model whose forward raises."""
    return CallsTooWide(), draw, score


class CastsToBf16(nn.Module):
    """A model with a layer in bf16, whose forward casts to this dtype by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).to(torch.bfloat16)).float()  # type: ignore[no-any-return]


def bf16_layer() -> Any:
    """Return a model with a layer in bf16."""
    return CastsToBf16(), draw, score


def sparse_embedding() -> Any:
    """Return a model with sparse gradients."""
    return nn.Embedding(5, 4, sparse=True), lambda generator: torch.randint(5, (2, 3), generator=generator), score
