"""A small model with its own batch and loss functions, like a user's factory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def perceptron() -> Any:
    """Return a model, a batch function that draws a tuple, and a loss function."""
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.2), nn.Linear(7, 3))
    return model, draw, score


def draw(generator: torch.Generator) -> Any:
    return (torch.randn(4, 5, generator=generator),)


def score(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output.sum(1) - batch[0].sum(1)).square().mean()
