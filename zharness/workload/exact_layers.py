"""Define exact models with a layer under vmap, with weights of two dtypes, and with an empty parameter at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from zharness.workload.exact_blocks import HIDDEN, BlocksModel, make_ternary
from zharness.workload.exact_mlp import WIDTH


class MappedLinear(nn.Module):
    """A linear layer whose forward maps torch.nn.functional.linear over the samples by torch.func.vmap."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # An engine may have replaced the function, so it is looked up in each forward.
        apply = torch.func.vmap(nn.functional.linear, in_dims=(0, None, None))
        return apply(x, self.weight, self.bias)


class MappedBlocksModel(BlocksModel):
    """A BlocksModel whose layer that is used twice maps itself over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = cast(nn.Linear, MappedLinear(self.shared))


class AdaptedModel(nn.Module):
    """A model of frozen weights in bf16, to which trained biases and low-rank adapters in fp32 are added.

    The model maps (batch, 16) to (batch, 16). Plain PyTorch can run it under torch.autocast only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.down, self.up = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        make_ternary(self)
        for layer in (self.first, self.last):
            layer.weight = nn.Parameter(layer.weight.detach().to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        output: Tensor = self.last(hidden) + self.up(self.down(hidden))
        return output


class EmptyLastModel(nn.Module):
    """A model of two linear layers whose last parameter has no elements.

    The layers have 384 elements. 1 to 4 ranks divide this number, even if an engine aligns shards to a few elements. So
    the last parameter begins where the last shard ends. The model maps (batch, 16) to (batch, 16).
    """

    HIDDEN = 12

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, self.HIDDEN, bias=False), nn.Linear(self.HIDDEN, WIDTH, bias=False)
        # A module's own parameters come before its submodules' parameters, so the last parameter is in a submodule.
        self.empty = nn.ParameterList([torch.ones(0, 3)])
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.relu(self.first(x)))
        return output + cast(Tensor, self.empty[0]).sum()


ADAPTED_PLAN = {"first": "colwise_gather_output", "last": "rowwise_split_input"}  # the adapters stay whole

# The summary, the class and the plan for tp of each model of this file, by name.
LAYERS_MODELS: Mapping[str, tuple[str, Callable[[], nn.Module], Mapping[str, str]]] = {
    "mapped": (
        "the model blocks with a layer that maps itself over the samples by torch.func.vmap",
        MappedBlocksModel,
        {},
    ),
    "adapted": (
        "an exact model of frozen weights in bf16 with trained biases and low-rank adapters in fp32",
        AdaptedModel,
        ADAPTED_PLAN,
    ),
    "empty_last": (
        "an exact model whose last parameter has no elements, behind elements that 1 to 4 ranks divide",
        EmptyLastModel,
        {},
    ),
}
