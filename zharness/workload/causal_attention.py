"""Define models of causal attention, exact and with random weights, whose sequence the axis cp splits.

Attention itself is a module without parameters, which an engine with sequence parallelism replaces. Attention is
causal, so that the order of the sequence's parts matters: without a mask, attention does not depend on the positions of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_heads import (
    DROPPED_SAMPLES,
    FEATURES,
    HEADS,
    DroppedHeads,
    ExactHeads,
    draw_mask,
    make_scores_small,
    select_features,
    token_loss,
)
from zharness.workload.exact_mlp import random_ternary
from zharness.workload.exact_tokens import VOCABULARY, TokenModel, mean_cross_entropy

TOKENS = 4
# Sizes of the model with random weights.
WIDTH = 12
OUTPUTS = 5
SPLIT: Mapping[str, Any] = {
    "cp_plan": ("attention",),
    "cp_parts": {"tokens of a sequence": TOKENS, "heads": HEADS},
}


class CausalAttention(nn.Module):
    """Attention in which a token sees itself and the tokens before it; the scores are not normalised.

    Query, key, value and output have the shape (batch, tokens, heads, features of a head).
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of every head."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return ((query @ key.transpose(-1, -2)).tril() @ value).transpose(1, 2)


class SoftmaxAttention(CausalAttention):
    """Causal attention by torch's kernel, whose scores are a softmax."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of every head."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class ExactContext(ExactHeads):
    """The model ``ExactHeads`` with causal attention over four tokens; it maps (batch, 4, 4) to itself."""

    def __init__(self) -> None:
        super().__init__()
        make_scores_small(self)
        self.attention = CausalAttention()

    def attend(self, x: Tensor) -> Tensor:
        """Return the output of causal attention whose scores are not normalised."""
        query, key, value = (part(x).unflatten(2, (HEADS, -1)) for part in (self.query, self.key, self.value))
        return self.out(self.attention(query, key, value).flatten(2))  # type: ignore[no-any-return]


class SteppedContext(ExactContext):
    """The model ``ExactContext`` with one nonzero number in each row of a weight, as in ``SteppedHeads``."""

    def __init__(self) -> None:
        super().__init__()
        select_features(self)


class DroppedContext(ExactContext, DroppedHeads):
    """The model ``ExactContext`` with dropout after attention and after the feed-forward layer."""

    def __init__(self, draw: Callable[[Tensor], Tensor] = draw_mask) -> None:
        super().__init__()
        self.drop_attention.draw = self.drop_mlp.draw = draw


class ContextTokens(ExactContext, TokenModel):
    """The model ``ExactContext`` whose outputs are logits: integers that all differ for one token.

    The embedding passes its input on, so that float32 holds the sums of larger logits.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(FEATURES))


class RandomContext(nn.Module):
    """A layer norm, causal attention and GELU between two linear layers; it maps (batch, 4, 12) to (batch, 4, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would have a gradient of zero plus rounding
        self.value = nn.Linear(WIDTH, WIDTH)
        self.attention = SoftmaxAttention()
        self.last = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        query, key, value = (part(hidden).unflatten(2, (HEADS, -1)) for part in (self.query, self.key, self.value))
        hidden = hidden + self.attention(query, key, value).flatten(2)
        return self.last(nn.functional.gelu(hidden))  # type: ignore[no-any-return]


def draw_exact(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets with elements in {-1, 0, 1}."""
    shape = (samples, TOKENS, FEATURES)
    return random_ternary(shape, generator), random_ternary(shape, generator)


def draw_seeded(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Draw inputs and targets, for DROPPED_SAMPLES times as many samples, and a seed for the dropout in the forward."""
    return *draw_exact(DROPPED_SAMPLES * samples, generator), int(torch.randint(1 << 30, (), generator=generator))


def draw_tokens(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs with elements in {-1, 0, 1}, and a token as the target of each place."""
    inputs = random_ternary((samples, TOKENS, FEATURES), generator)
    return inputs, torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)


def draw_random(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw normally distributed inputs and targets."""
    inputs = torch.randn(samples, TOKENS, WIDTH, generator=generator)
    return inputs, torch.randn(samples, TOKENS, OUTPUTS, generator=generator)


# The draw function and the fields of ModelSpec of each model.
MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        draw_exact,
        {
            "name": "context",
            "summary": "an exact block of causal attention, whose sequence cp splits",
            **SPLIT,
            "build": ExactContext,
            "loss": token_loss,
            "exact": True,
            "stands_in_for": "exact",
        },
    ),
    (
        draw_exact,
        {
            "name": "stepped_context",
            "summary": "the model context with one number in a row of a weight, for programs of many steps",
            **SPLIT,
            "build": SteppedContext,
            "loss": token_loss,
            "exact": True,
        },
    ),
    (
        draw_seeded,
        {
            "name": "dropped_context",
            "summary": "the model context with dropout of activations that cp splits along the sequence",
            **SPLIT,
            "build": DroppedContext,
            "loss": token_loss,
            "exact": True,
            "stands_in_for": "dropped_sequence",
        },
    ),
    (
        draw_tokens,
        {
            "name": "context_tokens",
            "summary": "the model context with a sharp cross-entropy over its tokens",
            **SPLIT,
            "build": ContextTokens,
            "loss": mean_cross_entropy,
            "exact": True,
            "stands_in_for": "tokens",
        },
    ),
    (
        draw_random,
        {
            "name": "random_context",
            "summary": "causal attention with a softmax and random weights, whose sequence cp splits",
            **SPLIT,
            "build": RandomContext,
            "loss": nn.functional.mse_loss,
            "stands_in_for": "mlp",
        },
    ),
)
