"""Models of users with a branch, a drawn branch, computed weights, and a state that is no tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from suites.model.tiny import draw, score
from suites.model.zoo import draw_sequences, mean_square
from suites.model.zoo_parts import draw_ids


class Branching(nn.Module):
    """A model that uses one of two weights, chosen by its inputs or by a random number."""

    def __init__(self, is_drawn: bool) -> None:
        super().__init__()
        self.is_drawn = is_drawn
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(5, 8) / 3) for _ in range(2)])
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = torch.rand(()) < 0.5 if self.is_drawn else inputs.sum() > 0
        return self.last(inputs @ self.weights[int(chosen)])  # type: ignore[no-any-return]


def branching() -> Any:
    """Return a model whose branch depends on the data."""
    return Branching(is_drawn=False), draw, score


def drawing() -> Any:
    """Return a model whose branch depends on a random number, as layer drop does."""
    return Branching(is_drawn=True), draw, score


def weight_norm_by_hooks() -> Any:
    """Return a model whose weight is computed by the hook of torch's deprecated weight_norm."""
    first = nn.utils.weight_norm(nn.Linear(5, 8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3)), draw, score


def spectral_norm() -> Any:
    """Return a model whose forward writes buffers by a power iteration, from which the next forward starts."""
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3)), draw, score


class Counting(nn.Linear):
    """A layer whose state dict has a number of its own."""

    forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, int]:
        return {"forwards": self.forwards}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.forwards = state["forwards"]


def extra_state() -> Any:
    """Return a model with an extra state."""
    return Counting(5, 3), draw, score


class TransposedWeight(nn.Module):
    """A layer whose weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def transposed() -> Any:
    """Return a model with a transposed weight."""
    return TransposedWeight(), draw, score


class Causal(nn.Module):
    """Attention with a mask that the forward makes in fp32, and a product under torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.attention(inputs, inputs, inputs, attn_mask=mask)[0]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = hidden * self.last.weight.sum()
        return self.last(hidden.float())  # type: ignore[no-any-return]


def causal() -> Any:
    """Return a model whose forward names dtypes."""
    return Causal(), draw_sequences, mean_square


class Packing(nn.Module):
    """A recurrent model that knows the number of its samples, since it has the length of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([5, 4, 3, 2]), batch_first=True)
        return self.last(self.layer(packed)[1][-1])  # type: ignore[no-any-return]


def packing() -> Any:
    """Return a model that does not run on a single sample."""
    return Packing(), draw_sequences, mean_square


def limited_norm() -> Any:
    """Return a model whose forward scales rows of its weight down, in place."""
    return nn.Sequential(nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 3)), draw_ids, mean_square
