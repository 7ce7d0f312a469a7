"""Define exact models of attention heads and a feed-forward layer, for tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
DROPOUTS = ("drop_attention", "drop_mlp")
DROPPED_SAMPLES = 4  # factor on the samples of other models, for 64 bits in the mask of one token
DROPPED_SEQUENCE_PLAN = SEQUENCE_PLAN | dict.fromkeys(DROPOUTS, "sequence_parallel_to_tensor")


class Affine(nn.LayerNorm):
    """A product with a weight and a sum with a bias for each feature: a layer norm without the norm, which rounds.

    The class is a subclass of nn.LayerNorm, so that an engine with special code for nn.LayerNorm uses this code.
    """

    def __init__(self) -> None:
        super().__init__(FEATURES)

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


def make_scores_small(model: ExactHeads) -> None:
    """Make query and key pass their input on, so that float32 holds the sums of a larger model."""
    with torch.no_grad():
        for layer in (model.query, model.key):
            layer.weight.copy_(torch.eye(FEATURES))


class SteppedHeads(ExactHeads):
    """The model ``ExactHeads`` with one nonzero number in each row of a weight.

    So float32 holds the sums of many steps. Each nonzero number is -1 or 1. The biases, which steps may change, stay in
    {-1, 0, 1}.
    """

    def __init__(self) -> None:
        super().__init__()
        select_features(self)


def select_features(model: ExactHeads) -> None:
    """Make each output of a linear layer one of its inputs, times 1 or -1, plus the bias."""
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
            outputs, inputs = layer.weight.shape
            chosen = nn.functional.one_hot(torch.randint(inputs, (outputs,)), inputs)
            layer.weight.copy_(chosen * torch.randint(2, (outputs, 1)).mul(2).sub(1))
    make_scores_small(model)


def split_heads(features: Tensor) -> Tensor:
    """Return (batch, tokens, features) as (batch, heads, tokens, features of a head)."""
    batch, tokens, _ = features.shape
    return features.view(batch, tokens, -1, FEATURES // HEADS).transpose(1, 2)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over samples of sum(output x target); its gradient is an integer over a power of two."""
    return (output * target).sum(dim=(1, 2)).mean()


def draw_mask(activations: Tensor) -> Tensor:
    """Return the mask by which dropout with probability 1/2 multiplies ``activations``: 0 or 2 for each element."""
    return nn.functional.dropout(torch.ones_like(activations), 0.5)


def keep_everything(activations: Tensor) -> Tensor:
    """Return the largest mask, 2 for each element, which bounds the sums of every mask."""
    return torch.full_like(activations, 2.0)


class Dropout(nn.Dropout):
    """Dropout with probability 1/2 that keeps the masks of forwards in training mode, in the order of its calls.

    The class is a subclass of nn.Dropout, so that an engine with special code for nn.Dropout uses this code.
    """

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(p=0.5)
        self.draw = draw
        self.masks: list[Tensor] = []

    def forward(self, activations: Tensor) -> Tensor:
        if not self.training:
            return activations
        mask = self.draw(activations)
        self.masks.append(mask.detach())
        return activations * mask


def call_block(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return the output of a block that is not recomputed in backward."""
    return block(hidden)


class DroppedHeads(ExactHeads):
    """The model ``ExactHeads`` with dropout after attention and after the feed-forward layer.

    ``run_block`` calls each of these two blocks, and may recompute it in backward.
    """

    def __init__(self, draw: Callable[[Tensor], Tensor] = draw_mask) -> None:
        super().__init__()
        make_scores_small(self)
        self.drop_attention, self.drop_mlp = Dropout(draw), Dropout(draw)
        self.run_block: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = call_block

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = hidden + self.run_block(self.attend_and_drop, hidden)
        hidden = hidden + self.run_block(self.feed_and_drop, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def attend_and_drop(self, hidden: Tensor) -> Tensor:
        """Return the output of attention with dropout."""
        dropped: Tensor = self.drop_attention(self.attend(self.before_attention(hidden)))
        return dropped

    def feed_and_drop(self, hidden: Tensor) -> Tensor:
        """Return the output of the feed-forward layer with dropout."""
        dropped: Tensor = self.drop_mlp(self.down(torch.relu(self.up(self.before_mlp(hidden)))))
        return dropped


def draw_sequences(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets with elements in {-1, 0, 1}."""
    shape = (samples, TOKENS, FEATURES)
    return random_ternary(shape, generator), random_ternary(shape, generator)


def draw_seeded_sequences(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Draw inputs and targets, for DROPPED_SAMPLES times as many samples, and a seed for the dropout in the forward."""
    drawn = draw_sequences(DROPPED_SAMPLES * samples, generator)
    return *drawn, int(torch.randint(1 << 30, (), generator=generator))


@dataclass(frozen=True)
class HeadsModel:
    """The properties of a model of this file: its class, how it draws a micro-batch, its loss, and its plan for tp."""

    name: str
    summary: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Any, ...]]
    loss: Callable[[Any, Any], Tensor]
    plan: Mapping[str, str]


_BLOCK = "an exact block of attention heads and a feed-forward layer"
_SEQUENCE = "tp with sequence parallelism"
HEADS_MODELS = (
    HeadsModel("heads", f"{_BLOCK}, split by tp on a mesh", ExactHeads, draw_sequences, token_loss, TENSOR_PLAN),
    HeadsModel(
        "sequence", f"{_BLOCK}, split by {_SEQUENCE} on a mesh", ExactHeads, draw_sequences, token_loss, SEQUENCE_PLAN
    ),
    HeadsModel(
        "stepped_heads",
        "the model heads with one number in a row of a weight, for programs of many steps",
        SteppedHeads,
        draw_sequences,
        token_loss,
        TENSOR_PLAN,
    ),
    HeadsModel(
        "stepped_sequence",
        "the model sequence with one number in a row of a weight, for programs of many steps",
        SteppedHeads,
        draw_sequences,
        token_loss,
        SEQUENCE_PLAN,
    ),
    HeadsModel(
        "dropped_heads",
        "the model heads with dropout of activations that are whole on every rank of tp",
        DroppedHeads,
        draw_seeded_sequences,
        token_loss,
        TENSOR_PLAN,
    ),
    HeadsModel(
        "dropped_sequence",
        "the model sequence with dropout of activations that tp splits along the sequence",
        DroppedHeads,
        draw_seeded_sequences,
        token_loss,
        DROPPED_SEQUENCE_PLAN,
    ),
)
