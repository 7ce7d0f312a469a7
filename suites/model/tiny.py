"""A small model with batches and a loss of its own: what a user's own factory would return."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def perceptron() -> Any:
    """A model with a batch of its own, a tuple, and a loss of its own."""
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.2), nn.Linear(7, 3))
    return model, draw, score


def draw(generator: torch.Generator) -> Any:
    return (torch.randn(4, 5, generator=generator),)


def score(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output.sum(1) - batch[0].sum(1)).square().mean()
