"""Models with odd parts: norms, routed experts, tied and quantized weights, outputs of any type, other dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suites.model.tiny import draw, score
from suites.model.zoo import draw_images, draw_sequences, mean_square

WIDTH = 8


def group_norm() -> Any:
    """Return a convolutional network with group norm."""
    layers = (
        nn.Conv2d(2, 6, 3),
        nn.GroupNorm(3, 6),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return nn.Sequential(*layers), draw_images, mean_square


def instance_norm() -> Any:
    """Return a convolutional network with transposed convolution and instance norm with weights."""
    layers = (nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.GELU(), nn.ConvTranspose2d(6, 2, 3))
    return nn.Sequential(*layers), draw_images, mean_square


class Experts(nn.Module):
    """Experts of which a router weighs the best two for each sample; all of them compute."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(5, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)) for _ in range(4)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.router(inputs).softmax(-1)
        chosen = scores * torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=-1)
        return (outputs * chosen.unsqueeze(1)).sum(-1)


def experts() -> Any:
    """Return a mixture of experts."""
    return Experts(), draw, score


class TiedModel(nn.Module):
    """An embedding whose weight is that of the head, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.middle(self.middle(self.embedding(ids)).tanh())
        return self.head(hidden)  # type: ignore[no-any-return]


def tied() -> Any:
    """Return a model with a tied weight and a layer that is used twice."""
    return TiedModel(), draw_ids, token_loss


def quantized() -> Any:
    """Return a model that is trained for int8: its activations are rounded in the forward."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def rounding() -> nn.Module:
        return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)  # type: ignore[no-untyped-call]

    return nn.Sequential(rounding(), nn.Linear(5, WIDTH), nn.ReLU(), rounding(), nn.Linear(WIDTH, 3)), draw, score


@dataclass
class Result:
    """The output of a model as a dataclass."""

    values: Tensor
    hidden: Tensor


class Outputs(nn.Module):
    """A perceptron that returns its values and its hidden layer in one of several types."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.first(inputs).tanh()
        values = self.last(hidden)
        if self.kind == "dict":
            return {"values": values, "hidden": hidden}
        return Result(values, hidden) if self.kind == "dataclass" else [(values,), {"deeper": [hidden, None]}]


def dict_output() -> Any:
    """Return a model whose output is a dictionary."""
    return Outputs("dict"), draw, lambda output, _: mean_square(output["values"], _) + mean_square(output["hidden"], _)


def dataclass_output() -> Any:
    """Return a model whose output is a dataclass."""
    return Outputs("dataclass"), draw, lambda output, _: mean_square(output.values, _) + mean_square(output.hidden, _)


def nested_output() -> Any:
    """Return a model whose output is nested."""
    return Outputs("nested"), draw, nested_loss


def nested_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss of a nested output."""
    return mean_square(output[0][0], batch) + mean_square(output[1]["deeper"][0], batch)


class Spectral(nn.Module):
    """A convolution by a complex weight in Fourier space, and a linear layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.last(torch.fft.irfft(torch.fft.rfft(inputs) * weight, n=5))  # type: ignore[no-any-return]


def complex_part() -> Any:
    """Return a model that computes with complex numbers, whose parameter is their real view."""
    return Spectral(torch.randn(3, 2)), draw, score


def complex_weight() -> Any:
    """Return a model with a complex parameter."""
    return Spectral(torch.randn(3, dtype=torch.complex64)), draw, score


class DoubleHead(nn.Module):
    """A perceptron whose last layer computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).tanh().double())  # type: ignore[no-any-return]


def float64_part() -> Any:
    """Return a model with a layer in float64."""
    return DoubleHead(), draw, lambda output, batch: score(output.float(), batch)


def late() -> Any:
    """Return a model whose first layer got its shape from a forward."""
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 3))
    with torch.no_grad():
        model(torch.zeros(1, 5))
    return model, draw, score


def lazy() -> Any:
    """Return a model whose first layer has no shape yet."""
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, 3)), draw, score


class CheckpointedModel(nn.Module):
    """A perceptron that recomputes a block with dropout in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, WIDTH), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, inputs, use_reentrant=False))  # type: ignore[no-any-return]


def recomputed() -> Any:
    """Return a model with activation checkpointing of its own."""
    return CheckpointedModel(), draw, score


class Encoder(nn.Module):
    """torch's transformer encoder, whose attention reads the weight of a submodule that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.encoder(inputs).mean(1))  # type: ignore[no-any-return]


def encoder() -> Any:
    """Return torch's own transformer encoder, with dropout."""
    return Encoder(), draw_sequences, mean_square


def weight_norm() -> Any:
    """Return a perceptron whose weight is computed from a direction and a length, by a parametrization."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(5, WIDTH))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, 3)), draw, score


def gru() -> Any:
    """Return a GRU cell that is called for each position."""
    return UnrolledGRU(), draw_sequences, mean_square


class UnrolledGRU(nn.Module):
    """A GRU cell that is called for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        state = inputs.new_zeros(len(inputs), 6)
        for position in inputs.unbind(1):
            state = self.cell(position, state)
        return self.last(state)  # type: ignore[no-any-return]


def draw_ids(generator: torch.Generator) -> Any:
    """Draw four sequences of token numbers."""
    return (torch.randint(11, (4, 5), generator=generator),)


def token_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the cross entropy of predicting each token itself."""
    return F.cross_entropy(output.flatten(0, 1), batch[0].flatten())
