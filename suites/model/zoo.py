"""Ordinary models of users, one factory each, with the properties that once made a run of ``zharness model`` red."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suites.model.tiny import draw, score


def batch_norm() -> Any:
    """Return a perceptron with batch norm, whose running statistics are buffers that each forward writes."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)), draw, score


def sync_norm() -> Any:
    """Return a perceptron with SyncBatchNorm, which normalizes over the rows of all ranks."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm()[0]), draw, score


class OwnSyncNorm(nn.SyncBatchNorm):
    """A class of the user's own."""


def own_sync_norm() -> Any:
    """Return a perceptron whose synchronized norm is of a class of its own."""
    return nn.Sequential(nn.Linear(5, 8), OwnSyncNorm(8), nn.Linear(8, 3)), draw, score


def conv_net() -> Any:
    """Return a convolutional network with batch norm."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )
    return model, draw_images, mean_square


class OneUnused(nn.Module):
    """A model that registers a layer which no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())  # type: ignore[no-any-return]


def unused() -> Any:
    """Return a model with one unused layer."""
    return OneUnused(), draw, score


class LastState(nn.Module):
    """An LSTM and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.lstm(inputs)[0][:, -1])  # type: ignore[no-any-return]


def lstm() -> Any:
    """Return a recurrent model."""
    return LastState(), draw_sequences, mean_square


class Recurrent(nn.Module):
    """A stack of two bidirectional LSTMs, each a block of its own, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LSTM(4, 4, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True),
                nn.GRU(8, 6, batch_first=True),
            ]
        )
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs, _ = layer(inputs)
        return self.last(inputs[:, -1])  # type: ignore[no-any-return]


def recurrent() -> Any:
    """Return a model whose blocks are recurrent layers."""
    return Recurrent(), draw_sequences, mean_square


class RaisesInForward(nn.Linear):
    """A layer that raises in a forward under autograd, but only with a process group."""

    def forward(self, inputs: Tensor) -> Tensor:
        if dist.is_initialized():
            return getattr(self.extra, "items")()  # noqa: B009 - raises, as a user's slip would
        return super().forward(inputs)

    extra = None


def raises() -> Any:
    """Return a model whose forward raises on ranks."""
    return nn.Sequential(RaisesInForward(5, 3)), draw, score


def in_bf16() -> Any:
    """Return a model whose weights are bf16."""
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)).to(torch.bfloat16), draw, mean_square


def not_a_number() -> Any:
    """Return a model with a NaN among its weights."""
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, float("nan"))
    return model, draw, score


def compiled() -> Any:
    """Return a compiled model."""
    return torch.compile(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))), draw, score


def dropping() -> Any:
    """Return a perceptron with dropout."""
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)), draw, score


def draw_images(generator: torch.Generator) -> Any:
    """Draw four small images."""
    return (torch.randn(4, 2, 7, 7, generator=generator),)


def draw_sequences(generator: torch.Generator) -> Any:
    """Draw four sequences of vectors."""
    return (torch.randn(4, 5, 4, generator=generator),)


def mean_square(output: Tensor, _batch: Any) -> Tensor:
    """Return the mean square of the outputs."""
    return output.float().square().mean()
