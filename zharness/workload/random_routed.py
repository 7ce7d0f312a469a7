"""Define a model with random weights whose gate chooses an expert for each token, and find choices near a tie.

The gate's logits are a product of two linear layers with the tokens. So their rounding error has a bound: each logit is
a sum of products of at most three numbers, computed by two sums in succession (Higham, sections 3.1 and 3.5). The
largest element of the softmax decides the expert. The softmax can make two logits equal if they differ only by a few
roundings of 1, its largest exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_mlp import WIDTH, linear_loss
from zharness.workload.exact_routed import EXPERT_PLAN, ExpertLayer, RoutedModel, draw_parts

TOKENS = 8  # of a sample; each expert gets some of the tokens of a micro-batch
SUMMED_TERMS = 2 * WIDTH + 2  # of a logit: the terms of both layers' sums, the bias, and the product with each weight


class RandomRoutedModel(nn.Module):
    """A linear layer, a layer of experts, GELU and another linear layer; it maps (batch, 8, 16) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(WIDTH, WIDTH), ExpertLayer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(nn.functional.gelu(self.moe(self.first(x))))
        return output


@dataclass(frozen=True)
class NearTie:
    """A token with an expert whose logit is ``margin`` below the largest logit, where rounding may change ``error``."""

    token: int
    margin: float
    error: float


@dataclass(frozen=True)
class GateLogits:
    """The gate's logits of each token in float64, and the sums of the absolute values of their terms.

    Both have the shape (tokens, experts).
    """

    logits: Tensor
    absolute: Tensor

    def find_near_tie(self, relative_error: float) -> NearTie | None:
        """Return the first token whose expert a rounding error may change, or None.

        ``relative_error`` times ``absolute`` bounds the error of a logit, and ``relative_error`` bounds the softmax's
        error.
        """
        first = self.logits.argmax(dim=1, keepdim=True)
        margins = self.logits.gather(1, first) - self.logits
        errors = relative_error * (1 + self.absolute.gather(1, first) + self.absolute)
        for token, expert in (margins <= errors).scatter(1, first, False).nonzero().tolist():
            return NearTie(token, float(margins[token, expert]), float(errors[token, expert]))
        return None


def compute_gate_logits(model: nn.Module, tokens: Tensor) -> GateLogits:
    """Compute the logits of a RandomRoutedModel's gate for tokens of shape (batch, 8, 16), in float64."""
    params = {name: param.detach().double() for name, param in model.named_parameters()}
    inputs = tokens.double().flatten(0, 1)

    def compute(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Return the gate's logits of the rows."""
        hidden = rows @ weights["first.weight"].T + weights["first.bias"]
        return hidden @ weights["moe.gate.weight"].T

    absolute = {name: param.abs() for name, param in params.items()}
    return GateLogits(compute(params, inputs), compute(absolute, inputs.abs()))


def draw_tokens(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw normally distributed inputs and targets."""
    shape = (samples, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


# The draw function and the fields of ModelSpec of each model of experts.
EXPERT_MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        draw_parts,
        {
            "name": "routed",
            "summary": "an exact model of four experts, of which a gate chooses one for each token",
            "build": RoutedModel,
            "loss": linear_loss,
            "exact": True,
            "ep_plan": EXPERT_PLAN,
            "stands_in_for": "exact",
        },
    ),
    (
        draw_tokens,
        {
            "name": "random_routed",
            "summary": "random weights, and four experts among which a random gate chooses for each token",
            "build": RandomRoutedModel,
            "loss": nn.functional.mse_loss,
            "ep_plan": EXPERT_PLAN,
            "stands_in_for": "mlp",
        },
    ),
)
