"""Define an exact block of attention heads and a feed-forward layer, for tensor and sequence parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.workload.exact_mlp import random_ternary

FEATURES = 4
TOKENS = 2  # a sequence that tp can split
HEADS = 2
HIDDEN = 6
# How tp splits the block: pairs of a column-wise and a row-wise layer, with one all-reduce for each pair.
TENSOR_PLAN = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
TENSOR_PLAN |= {"up": "colwise", "down": "rowwise"}
# Between the pairs the sequence is split, so that sums are reduce-scattered and inputs all-gathered.
SEQUENCE_PLAN = {
    "embed": "rowwise_split_input_to_sequence",
    "before_attention": "sequence_parallel",
    "query": "sequence_to_colwise",
    "key": "sequence_to_colwise",
    "value": "sequence_to_colwise",
    "out": "rowwise_to_sequence",
    "before_mlp": "sequence_parallel",
    "up": "sequence_to_colwise",
    "down": "rowwise_to_sequence",
    "head": "sequence_to_colwise_gather_output",
}


class Affine(nn.Module):
    """A product with a weight and a sum with a bias for each feature: a layer norm without the norm, which rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class ExactHeads(nn.Module):
    """A residual block of attention without softmax and a ReLU layer, whose parameters are in {-1, 0, 1}.

    The model maps (batch, 2, 4) to (batch, 2, 4). The number of heads of a rank follows from the shape of its query, so
    that a rank of tp computes its own heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.before_attention = Affine()
        self.query = nn.Linear(FEATURES, FEATURES, bias=False)
        self.key = nn.Linear(FEATURES, FEATURES, bias=False)
        self.value = nn.Linear(FEATURES, FEATURES)
        self.out = nn.Linear(FEATURES, FEATURES)
        self.before_mlp = Affine()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)
        self.head = nn.Linear(FEATURES, FEATURES, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(random_ternary(tuple(parameter.shape)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = hidden + self.attend(self.before_attention(hidden))
        hidden = hidden + self.down(torch.relu(self.up(self.before_mlp(hidden))))
        return self.head(hidden)  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        """Return the output of attention whose scores are not normalised."""
        query, key, value = (split_heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = (query @ key.transpose(-1, -2)) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def split_heads(features: Tensor) -> Tensor:
    """Return (batch, tokens, features) as (batch, heads, tokens, features of a head)."""
    batch, tokens, _ = features.shape
    return features.view(batch, tokens, -1, FEATURES // HEADS).transpose(1, 2)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over samples of sum(output x target); its gradient is an integer over a power of two."""
    return (output * target).sum(dim=(1, 2)).mean()
