"""Define an exact model of experts, of which a gate chooses one for each token.

The gate's logits are 1024 or -1024 for one pair of experts and 0 for the other, by the sign of a token's first feature.
So the softmax is bitwise 1/2 for two experts and 0 for the others, and the first of the two experts gets the token. No
rounding decides the choice, and the gate has a gradient. The output is multiplied by 4, so that the products with 1/2
and 1/2 in the softmax's backward stay integers. The certificate runs on absolute values, and so uses only the first
expert; it gives this expert the largest weights of all experts (``cover_choices``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.workload.exact_blocks import make_ternary
from zharness.workload.exact_mlp import WIDTH, random_ternary

EXPERTS = 4
EXPERT_PLAN = {"moe": EXPERTS}
SCALE = 4
LOGIT = 1024.0  # exp(-1024) is 0 in float64, too


class ExpertLayer(nn.Module):
    """Experts and a gate: each row of (..., 16) goes to the expert with the largest softmax, times this softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        softmax = torch.softmax(self.gate(tokens), dim=-1)
        chosen = nn.functional.one_hot(softmax.argmax(dim=-1), EXPERTS).to(softmax.dtype)
        outputs = torch.stack([expert(tokens) for expert in self.experts], dim=-2)
        return ((softmax * chosen).unsqueeze(-1) * outputs).sum(dim=-2)

    def cover_choices(self) -> None:
        """Give every expert the largest number of all experts, so that the expert that a token gets bounds all experts.

        The certificate, which runs on absolute values, sends all tokens to the first expert.
        """
        with torch.no_grad():
            for params in zip(*(expert.parameters() for expert in self.experts), strict=True):
                largest = torch.stack(list(params)).amax(dim=0)
                for param in params:
                    param.copy_(largest)


class RoutedModel(nn.Module):
    """A linear layer, a layer of experts and another linear layer; maps (batch, 16) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(WIDTH, WIDTH), ExpertLayer(), nn.Linear(WIDTH, WIDTH)
        make_ternary(self)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH))
            self.first.bias[0] = 0.0
            self.moe.gate.weight.zero_()
            self.moe.gate.weight[: EXPERTS // 2, 0] = LOGIT
            for parameter in self.moe.experts[0].parameters():
                parameter.copy_(torch.where(parameter == 0, 1.0, parameter))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(SCALE * self.moe(self.first(x)))
        return output


def draw_parts(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets in {-1, 0, 1}; the first feature of an input, which chooses the expert, is not 0."""
    inputs = random_ternary((samples, WIDTH), generator)
    inputs[:, 0] = torch.where(inputs[:, 0] == 0, 1.0, inputs[:, 0])
    return inputs, random_ternary((samples, WIDTH), generator)
