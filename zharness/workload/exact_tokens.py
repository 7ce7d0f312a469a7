"""Define an exact model of tokens and its cross-entropy, whose logits tp may split over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.workload.exact_heads import (
    FEATURES,
    SEQUENCE_PLAN,
    TENSOR_PLAN,
    TOKENS,
    ExactHeads,
    HeadsModel,
    make_scores_small,
)
from zharness.workload.exact_mlp import random_ternary

VOCABULARY = 4
PADDING = -100  # the target of a token that does not count, as in torch's cross-entropy
# exp(-SHARPNESS) is 0 in float32: the softmax of integers that all differ, times SHARPNESS, is one-hot.
SHARPNESS = 128.0
PARALLEL_LOGITS_PLAN = TENSOR_PLAN | {"head": "colwise_split_logits"}
SEQUENCE_LOGITS_PLAN = SEQUENCE_PLAN | {"head": "sequence_to_colwise_split_logits"}


class TokenModel(ExactHeads):
    """The model ``ExactHeads`` whose outputs are logits: integers that all differ for one token."""

    def __init__(self) -> None:
        super().__init__()
        make_scores_small(self)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        make_logits_differ(self.head)


@torch.no_grad()
def make_logits_differ(head: nn.Linear) -> None:
    """Draw a head whose outputs for a token of integers all differ, because their remainders by VOCABULARY do."""
    head.weight.copy_(VOCABULARY * random_ternary((VOCABULARY, FEATURES)))
    head.bias.copy_(torch.arange(VOCABULARY))


def draw_tokens(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs with elements in {-1, 0, 1}, and a token as the target of each place."""
    inputs = random_ternary((samples, TOKENS, FEATURES), generator)
    return inputs, torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)


def sum_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum of sharp cross-entropies over the tokens that count, divided by the sharpness.

    Each cross-entropy is the largest logit minus the target's logit, which is an integer, because the softmax is
    one-hot. ``logits`` may be a DTensor inside torch's ``loss_parallel``.
    """
    flat = SHARPNESS * logits.flatten(0, 1)
    total = nn.functional.cross_entropy(flat, target.flatten(), ignore_index=PADDING, reduction="sum")
    return total / SHARPNESS


def mean_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum of a micro-batch's cross-entropies divided by the number of its places."""
    return sum_cross_entropy(logits, target) / target.numel()


_MODEL = "an exact model of tokens with a sharp cross-entropy"
TOKEN_MODELS = tuple(
    HeadsModel(name, summary, TokenModel, draw_tokens, mean_cross_entropy, plan)
    for name, summary, plan in (
        ("tokens", f"{_MODEL}, whose logits are whole", TENSOR_PLAN),
        ("parallel_tokens", f"{_MODEL}, whose logits tp splits over the vocabulary", PARALLEL_LOGITS_PLAN),
        ("sequence_tokens", "the model parallel_tokens with sequence parallelism", SEQUENCE_LOGITS_PLAN),
    )
)
