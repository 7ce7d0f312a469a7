"""Factories of models that end the process, or return a model without values."""

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
