"""The exact-arithmetic model: integers small enough that no sum is ever rounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


def random_ternary(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """A float tensor of ``shape`` drawn from {-1, 0, 1}."""
    return torch.randint(-1, 2, shape, generator=generator).float()


class ExactMLP(nn.Module):
    """An embedding-free residual ReLU network with ternary weights and biases: (batch, 16) to (batch, 16).

    Activations stay integers of a few hundred at most and gradients stay integers over a power of two, far inside
    fp32's 24 bits of significand; a change that leaves this range is caught by the certificate in parity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.second = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(random_ternary(tuple(parameter.shape)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden + torch.relu(self.second(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


def linear_loss(output: Tensor, target: Tensor) -> Tensor:
    """Sum of output x target over features, mean over samples: its gradient is an integer over a power of two."""
    return (output * target).sum(dim=1).mean()
