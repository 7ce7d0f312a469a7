"""Define exact models, in which no sum is rounded, for the laws about autograd and about unusual parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.workload.exact_mlp import WIDTH, random_ternary

HIDDEN = 5
EXPERTS = 3
MAX_FACTOR_ELEMENTS = 3  # parameters with at most 3 elements multiply the output of other layers

# The kinds of unusual parameters.
ODD_PARAMETERS: Mapping[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.empty(WIDTH, HIDDEN).t(),
    "one": lambda: torch.ones(1),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.ones(0, 3),
    "narrow": lambda: torch.ones(3, dtype=torch.bfloat16),
    "wide": lambda: torch.ones(3, dtype=torch.float64),
}

Block = Callable[[Tensor], Tensor]


def call_block(block: Block, hidden: Tensor) -> Tensor:
    """Return ``block(hidden)``.

    This function is the default of ``run_block``, an argument of the forward of BlocksModel. A law may pass a function
    that runs the block under activation checkpointing.
    """
    return block(hidden)


def first_output(output: Tensor, extra: Tensor) -> Any:
    """Return ``output``. This function is the default of ``pack``, an argument of the forward of BlocksModel."""
    return output


class BlocksModel(nn.Module):
    """A model with a layer that is used twice, a frozen layer, a scalar factor, and a second head that reads the input.

    The model maps (batch, 16) to (batch, 16). Its forward takes three options. ``run_block(block, hidden)`` is the
    function that runs the block, for example under activation checkpointing. ``pack(output, extra)`` is the function
    that makes the return value from the output and from the second head's output ``extra``, of shape (batch, 3), which
    shares no graph with ``output``. ``with_dropout`` says whether dropout is applied to the block's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.factor = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.last = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(0.5)  # multiplies the kept elements by 2, which is exact
        make_ternary(self)

    def block(self, hidden: Tensor) -> Tensor:
        """Apply the shared layer twice, and multiply its output by the scalar factor."""
        once = torch.relu(self.shared(hidden))
        return torch.relu(self.shared(once)) * self.factor

    def block_with_dropout(self, hidden: Tensor) -> Tensor:
        """Apply the block, and then apply dropout with probability 0.5 to its output."""
        activated = self.block(hidden)
        # GPUs draw another mask for float64, in which the law's numbers are certified.
        mask: Tensor = self.dropout(torch.ones_like(activated, dtype=torch.float32))
        return activated * mask.to(activated.dtype)

    def forward(
        self,
        x: Tensor,
        run_block: Callable[[Block, Tensor], Tensor] = call_block,
        pack: Callable[[Tensor, Tensor], Any] = first_output,
        with_dropout: bool = False,
    ) -> Any:
        hidden = run_block(self.block_with_dropout if with_dropout else self.block, self.first(x))
        output = self.last(self.frozen(hidden))
        return output if pack is first_output else pack(output, self.head(x))


class DelegatingModule(nn.Module):
    """A module that returns the attributes of its inner module as its own, like the wrappers of PEFT adapters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


class DelegatingBlocksModel(BlocksModel):
    """A BlocksModel whose layer that is used twice is inside a module that returns the layer's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = cast(nn.Linear, DelegatingModule(self.shared))


class BranchingModel(nn.Module):
    """A model with tied, frozen, unused and conditionally used parameters.

    The model maps (batch, 16) to (batch, 16). The forward's argument ``branch`` says whether the forward uses the layer
    ``self.branch``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.tied = nn.Linear(WIDTH, HIDDEN)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.twice = nn.Linear(HIDDEN, HIDDEN)
        self.branch = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.by_attribute = nn.Linear(HIDDEN, WIDTH, bias=False)
        make_ternary(self)

    def hidden(self, x: Tensor, branch: bool) -> Tensor:
        """Return the hidden activations, of shape (batch, 5), for inputs of shape (batch, 16)."""
        hidden = torch.relu(self.first(x) + self.tied(x))
        if branch:
            hidden = hidden + self.branch(hidden)
        return torch.relu(self.twice(torch.relu(self.twice(self.frozen(hidden)))))

    @torch.no_grad()
    def largest_weight(self) -> Tensor:
        """Return the largest absolute value in the weight of ``by_attribute``, computed without autograd. It is 1."""
        return self.by_attribute.weight.abs().max()

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        largest = self.largest_weight()
        return nn.functional.linear(self.hidden(x, branch), self.by_attribute.weight) * largest


class OddParametersModel(BranchingModel):
    """A BranchingModel with additional parameters of unusual shapes, memory layouts and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(ODD_PARAMETERS["transposed"]())
        self.one = nn.Parameter(ODD_PARAMETERS["one"]())
        self.scalar = nn.Parameter(ODD_PARAMETERS["scalar"]())
        self.empty = nn.Parameter(ODD_PARAMETERS["empty"]())
        self.narrow = nn.Parameter(ODD_PARAMETERS["narrow"]())
        self.wide = nn.Parameter(ODD_PARAMETERS["wide"]())
        make_ternary(self)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        largest, hidden = self.largest_weight(), self.hidden(x, branch)
        output = nn.functional.linear(hidden, self.by_attribute.weight) * largest + hidden @ self.transposed
        mixed = (self.narrow[:2].to(x.dtype) * self.wide[1:].to(x.dtype)).sum()
        return output * self.one + self.scalar + self.empty.sum() + mixed


# Name, summary and class.
BRANCHING_MODELS: Sequence[tuple[str, str, type[BranchingModel]]] = (
    (
        "changing",
        "tied, frozen, unused and branched layers, and a weight read by attribute; exact",
        BranchingModel,
    ),
    (
        "odd",
        "an exact model of tied, frozen, unused, empty, tiny, transposed, branching and mixed parameters",
        OddParametersModel,
    ),
)


class CastingLinear(nn.Linear):
    """A linear layer that casts its weight to the dtype of its input, because a frozen layer may keep fp32."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


@torch.no_grad()
def make_wide(layer: nn.Linear) -> CastingLinear:
    """Return a layer that computes the same as ``layer`` with float64 weights, which it casts to the input's dtype."""
    wide = CastingLinear(layer.in_features, layer.out_features, layer.bias is not None, "meta", torch.float64)
    for name, parameter in layer.named_parameters():
        setattr(wide, name, nn.Parameter(parameter.double()))
    return wide


class SimilarLayersModel(nn.Module):
    """A model of parallel layers of one shape, whose parameters all have different values.

    One parameter is tied, one is frozen, and two are tiny.

    The model maps (..., 3 x ``inputs``) to (..., ``outputs``). An engine that reads the wrong parameter of the same
    shape returns wrong values. The parameter ``factor`` has ``tiny`` elements; a parameter of one element is owned by
    at most one rank. The parameter ``shift`` has ``short`` elements; of three elements, two ranks own two and one. The
    forward's argument ``with_third`` says whether the forward uses the layer ``third``.
    """

    def __init__(self, inputs: int = HIDDEN, outputs: int = WIDTH, tiny: int = 1, short: int = 3) -> None:
        super().__init__()
        self.inputs = inputs
        self.first = nn.Linear(inputs, outputs)
        self.second = nn.Linear(inputs, outputs)
        self.frozen = CastingLinear(inputs, outputs).requires_grad_(False)
        self.tied = nn.Linear(inputs, outputs)
        self.tied.weight = self.first.weight
        self.third = nn.Linear(inputs, outputs)
        self.factor = nn.Parameter(torch.ones(tiny))
        self.shift = nn.Parameter(torch.ones(short))
        make_ternary(self)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.view(-1)[0] = index + 1.0

    def forward(self, x: Tensor, with_third: bool = True) -> Tensor:
        left, middle, right = torch.split(x[..., : 3 * self.inputs], self.inputs, dim=-1)
        output: Tensor = self.first(left) + 2 * self.second(middle) + self.tied(right)
        output = output + self.frozen(left * self.shift.sum())
        if with_third:
            output = output + 4 * self.third(right + middle)
        return output * self.factor.sum()


class AlignedLayersModel(SimilarLayersModel):
    """A SimilarLayersModel whose parameters are all divisible by 2, 3 and 4 ranks, so that no shard is padded.

    The model maps (batch, 18) to (batch, 12).
    """

    INPUTS, OUTPUTS = 6, 12

    def __init__(self) -> None:
        super().__init__(self.INPUTS, self.OUTPUTS, tiny=self.OUTPUTS, short=self.OUTPUTS)


class OneOddParameterModel(nn.Module):
    """A model of two linear layers and one parameter of an unusual shape, memory layout or dtype.

    The model maps (batch, 16) to (batch, 16).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.odd = nn.Parameter(ODD_PARAMETERS[kind]())
        self.last = nn.Linear(HIDDEN, WIDTH)
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        output: Tensor = self.last(hidden)
        if self.odd.shape == (HIDDEN, WIDTH):
            return output + hidden @ self.odd
        return output + self.odd.to(x.dtype).sum()


class ExpertsModel(nn.Module):
    """A model that adds the outputs of some of its experts. ``forward`` takes the indices of the experts as ``route``.

    The model maps (..., 16) to (..., 16), with any leading dimensions. The outputs are added in the order of ``route``,
    by default all of them. No gradient depends on more than one layer's weights, so that several optimizer steps with a
    learning rate of 1 remain exact. The parameter ``offset`` has one element, so that it has fewer elements than there
    are ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.offset = nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(EXPERTS))
        self.last = nn.Linear(HIDDEN, WIDTH, bias=False)
        make_ternary(self)

    def forward(self, x: Tensor, route: Sequence[int] = tuple(range(EXPERTS))) -> Tensor:
        hidden = torch.relu(self.first(x) + self.offset)
        output: Tensor = self.last(hidden)
        for index in route:
            output = output + self.experts[index](hidden)
        return output


class GatedLinear(nn.Linear):
    """A linear layer with a further parameter, ``gate``, which is added to the output if ``gated`` is true."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gated: bool) -> Tensor:  # type: ignore[override]
        output = super().forward(x)
        return output + self.gate if gated else output


class GatedModel(nn.Module):
    """A model whose last layer has a parameter that not every forward uses.

    The model maps (batch, 16) to (batch, 16). The forward's argument ``gated`` says whether the gate is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.last = GatedLinear()
        make_ternary(self)

    def forward(self, x: Tensor, gated: bool = True) -> Tensor:
        output: Tensor = self.last(torch.relu(self.first(x)), gated)
        return output


class LookupModel(nn.Module):
    """A model with an embedding whose gradients are sparse, and a linear head.

    The model maps (batch, 16) to (batch, 16). Inputs of -1, 0 and 1 look up rows 0 to 2 of the embedding, most of them
    several times per sample; row 3 is never looked up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, HIDDEN, sparse=True)
        self.last = nn.Linear(HIDDEN, WIDTH)
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.table((x + 1).long()).sum(dim=1))
        return output


@torch.no_grad()
def make_ternary(module: nn.Module) -> None:
    """Draw every element of the parameters of ``module`` from {-1, 0, 1}, without 0 in very small parameters.

    Parameters with at most MAX_FACTOR_ELEMENTS elements are drawn from {-1, 1}, because they multiply the output of
    other layers: a factor of zero would make the gradients of all earlier layers zero, and a comparison of zeros shows
    nothing.
    """
    for parameter in module.parameters():
        parameter.copy_(random_ternary(tuple(parameter.shape)))
        if parameter.numel() <= MAX_FACTOR_ELEMENTS:
            parameter.masked_fill_(parameter == 0, 1)


def draw_aligned_parts(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets in {-1, 0, 1} of the widths of AlignedLayersModel."""
    inputs = random_ternary((samples, 3 * AlignedLayersModel.INPUTS), generator)
    return inputs, random_ternary((samples, AlignedLayersModel.OUTPUTS), generator)
