"""Define small models with random initial weights: an MLP, a transformer, a convolutional network and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 12
OUTPUTS = 5
DEPTH = 2  # transformer blocks
WIDTH = 16  # of the residual stream
VOCABULARY = 29
SEQUENCE = 6
CHANNELS = 3
PIXELS = 6


class MLP(nn.Module):
    """A model of linear layers with different widths and a layer norm; it maps (batch, 12) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 19)
        self.norm = nn.LayerNorm(19)
        self.second = nn.Linear(19, 17, bias=False)
        self.last = nn.Linear(17, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.norm(self.first(x)))
        return self.last(nn.functional.gelu(self.second(hidden)))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """A transformer block of causal self-attention and a feed-forward layer, both pre-norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))  # type: ignore[no-any-return]


# How tp splits the blocks. One layer computes queries, keys and values; its output is gathered, because a chunk of it
# is no head.
TENSOR_PLAN = {
    f"blocks.{block}.{layer}": word
    for block in range(DEPTH)
    for layer, word in (
        ("qkv", "colwise_gather_output"),
        ("out", "rowwise_split_input"),
        ("up", "colwise"),
        ("down", "rowwise"),
    )
}


class Transformer(nn.Module):
    """A transformer language model whose embedding and head are tied.

    The model maps token ids of shape (batch, 6) to logits of shape (batch, 6, 29).
    """

    def __init__(self, width: int = WIDTH, heads: int = 2, depth: int = DEPTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def draw_tokens(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw token ids as the inputs, and use the token after each input token as its target."""
    drawn = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class ConvNet(nn.Module):
    """A model of two convolutions, a group norm and a linear head; it maps (batch, 3, 6, 6) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, 6, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv2d(6, 7, kernel_size=3, stride=2, bias=False)
        self.head = nn.Linear(7, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.norm(self.first(x)))
        return self.head(self.second(hidden).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class StatefulModel(nn.Module):
    """A model with a batch norm with running statistics, and dropout; it maps (batch, 12) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 19)
        self.norm = nn.BatchNorm1d(19)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(19, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.norm(self.first(x)))
        return self.last(self.dropout(hidden))  # type: ignore[no-any-return]


class FusedLinearLoss(torch.autograd.Function):
    """An autograd Function of a loss over ``hidden @ weight.T`` that computes the gradients in its forward.

    Fused linear losses compute gradients in this way. The Function's forward calls ``torch.func.grad_and_value`` on a
    weight of the model while the model's forward runs, as in deepspeedai/DeepSpeed#7913.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return one loss per sample, of shape (batch, 1).

        ``hidden`` has the shape (batch, features), and ``weight`` has the shape (outputs, features).
        """

        def total(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            per_sample = (hidden @ weight.t()).square().mean(dim=1, keepdim=True)
            return per_sample.sum(), per_sample

        transform = torch.func.grad_and_value(total, argnums=(0, 1), has_aux=True)
        (grad_hidden, grad_weight), (_, per_sample) = transform(hidden, weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        detached: Tensor = per_sample.detach()
        return detached

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the gradients that the forward computed by the incoming gradient.

        The result is correct only if every sample has the same incoming gradient, as it has in a mean.
        """
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, grads[0][0] * grad_weight


class FusedLossNet(nn.Module):
    """A model whose forward reads the weight of its head but never calls the head.

    The model maps (batch, 12) to one loss per sample, of shape (batch, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 17), nn.Tanh(), nn.Linear(17, 9))
        self.head = nn.Linear(9, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return FusedLinearLoss.apply(self.body(x), self.head.weight)  # type: ignore[no-any-return, no-untyped-call]
