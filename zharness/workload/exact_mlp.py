"""Define the exact MLP. Its weights and inputs are small integers, so that no sum is rounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


def random_ternary(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Draw a float tensor of the shape ``shape`` whose elements are in {-1, 0, 1}."""
    return torch.randint(-1, 2, shape, generator=generator).float()


class ExactMLP(nn.Module):
    """A residual ReLU network whose weights and biases are in {-1, 0, 1}.

    The model maps (batch, 16) to (batch, 16). Activations are integers of a few hundred at most, and gradients are
    integers over a power of two, so both fit into fp32's 24 bits of significand. The certificate in ``zharness.parity``
    verifies this for each cell.
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
    """Return the mean over samples of sum(output x target); its gradient is an integer over a power of two."""
    return (output * target).sum(dim=1).mean()
