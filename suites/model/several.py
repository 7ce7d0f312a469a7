"""A module of several models, one of which cannot be built."""

from __future__ import annotations

from typing import Any

from torch import nn

from suites.model.tiny import draw, score

WIDTH = 3


def small() -> Any:
    """Return a small model."""
    return nn.Linear(5, WIDTH), draw, score


def large(width: int = 8) -> Any:
    """Return a larger model."""
    return nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, WIDTH)), draw, score


def unbuildable() -> Any:
    """Raise, as a factory does whose file is missing."""
    raise FileNotFoundError("no weights.pt")


def with_width(width: int) -> Any:
    """Return a model of a width; this is no factory, since it needs an argument."""
    return nn.Linear(5, width), draw, score


def _helper() -> Any:
    return nn.Linear(5, WIDTH), draw, score
