"""Define a model for mixed precision: it has layers that autocast runs in fp32, buffers and a frozen parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.workload.exact_mlp import random_ternary
from zharness.workload.nets import FEATURES, OUTPUTS

HIDDEN = 11
NONZERO = 3  # nonzero weights of each output in the exact model
TENSOR_PLAN = {"first": "colwise_gather_output", "inner": "colwise_gather_output", "last": "rowwise_split_input"}


def pass_through(hidden: Tensor) -> Tensor:
    """Return ``hidden``. This function is the default of ``transform``, an argument of MixedPrecisionModel."""
    return hidden


class MixedPrecisionModel(nn.Module):
    """A model of linear layers and a layer norm, in which one linear layer runs with torch.autocast disabled.

    The model maps (batch, 12) to (batch, 5). The forward applies the function ``transform`` to the first layer's
    output. The forward casts the frozen parameter and the buffers to the dtype of the activations, because the
    parameters may be in low precision.
    """

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.last = nn.Linear(HIDDEN, OUTPUTS)
        self.gain = nn.Parameter(torch.rand(HIDDEN) + 0.5, requires_grad=False)
        self.register_buffer("shift", torch.randn(HIDDEN))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        return self.last(self.run_inner(self.run_norm(x, transform), x.dtype))  # type: ignore[no-any-return]

    def run_norm(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        """Return the activations after the first layer, ``transform`` and the layer norm."""
        return nn.functional.gelu(self.norm(transform(self.first(x))))

    def run_inner(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the activations after the layer ``inner``, which runs in ``dtype`` with torch.autocast disabled."""
        hidden = hidden * self.gain.to(hidden.dtype) + self.shift.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.tanh(self.inner(hidden.to(dtype)))


class ExactMixedPrecisionModel(MixedPrecisionModel):
    """The model ``MixedPrecisionModel`` with integers and without functions that round, so that tp may split its sums.

    Each output of a layer has three inputs with a weight of -1 or 1, so that bf16 holds every activation and gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = cast(nn.LayerNorm, Scale(HIDDEN))
        with torch.no_grad():
            for layer in (self.first, self.inner, self.last):
                layer.weight.copy_(draw_sparse(layer.weight))
            for tensor in (self.first.bias, self.last.bias, self.shift):
                tensor.copy_(torch.randint(-1, 2, tensor.shape))
            self.gain.copy_(torch.randint(1, 3, self.gain.shape))

    def run_norm(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        """Return the activations after the first layer, ``transform`` and the scale."""
        return torch.relu(self.norm(transform(self.first(x))))

    def run_inner(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the activations after the layer ``inner``, which runs in ``dtype`` with torch.autocast disabled."""
        hidden = hidden * self.gain.to(hidden.dtype) + self.shift.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.relu(self.inner(hidden.to(dtype)))


class Scale(nn.Module):
    """A product with a frozen weight of 1 or 2 for each feature, in fp32, because autocast does not cast the weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(1, 3, (features,)).float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def draw_sparse(weight: Tensor) -> Tensor:
    """Return a weight of the shape of ``weight`` with NONZERO elements of -1 or 1 in each row."""
    drawn = torch.zeros_like(weight)
    places = torch.rand(weight.shape).argsort(dim=1)[:, :NONZERO]
    return drawn.scatter_(1, places, 2.0 * torch.randint(2, places.shape) - 1)


def draw_integers(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets in {-1, 0, 1}."""
    return random_ternary((samples, FEATURES), generator), random_ternary((samples, OUTPUTS), generator)


class RecomputedMixedPrecisionModel(MixedPrecisionModel):
    """MixedPrecisionModel, whose backward recomputes the first layer, and the last one by reentrant checkpointing."""

    def forward(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        hidden = checkpoint(self.run_norm, x, transform, use_reentrant=False)
        hidden = self.run_inner(hidden, x.dtype)
        return checkpoint(self.last, hidden, use_reentrant=True)  # type: ignore[no-any-return]
