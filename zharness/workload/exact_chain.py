"""Define models that call their blocks one after another, so that a pipeline can split them into stages.

All of these models are exact except one model with random weights. In that model, a message between two stages that
rounds numbers gives wrong results; small integers stay the same in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload.exact_blocks import make_ternary
from zharness.workload.exact_heads import FEATURES, Dropout, call_block, draw_mask
from zharness.workload.exact_mlp import WIDTH
from zharness.workload.exact_tokens import VOCABULARY, draw_tokens, make_logits_differ, mean_cross_entropy

BLOCKS = 4
ODD_WIDTHS = (WIDTH, 13, 9, 11, WIDTH)  # widths between blocks: a stage sends another width than it gets
PIPELINE_PLAN = tuple(f"blocks.{index}" for index in range(BLOCKS))
# The inputs and outputs of each block are whole, since every block can be a stage. Blocks that share a weight have the
# same word.
SPLIT_BLOCKS = dict(
    zip(
        (f"{block}.linear" for block in PIPELINE_PLAN),
        ("colwise_gather_output", "rowwise_split_input", "rowwise_split_input", "colwise_gather_output"),
        strict=True,
    )
)
TIED_ENDS_PLAN = ("ends", *PIPELINE_PLAN[: BLOCKS - 2], "ends")


class Block(nn.Module):
    """A linear layer and ReLU; maps (batch, width) to (batch, width)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(self.linear(hidden))


class SkippingBlock(Block):
    """A block that returns its output and a tensor that bypasses the block: the input of the first block."""

    def forward(self, hidden: Tensor, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        skipped = hidden if skipped is None else skipped
        return super().forward(hidden) + skipped, super().forward(skipped)


class LastBlock(Block):
    """A block that adds up the two outputs of the previous block; it has no ReLU."""

    def forward(self, hidden: Tensor, skipped: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = self.linear(hidden + skipped)
        return output


class MaskedBlock(Block):
    """A block that returns a mask of integers and then its output; the next block multiplies the output by the mask.

    The mask gets no gradient, and has as many elements as the output. The mask of the first block is 1 where its input
    is not 0.
    """

    def forward(self, mask: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mask, hidden = ((mask != 0).int(), mask) if hidden is None else (mask, hidden)
        return mask, super().forward(hidden * mask)


class LastMaskedBlock(Block):
    """A block that multiplies the output of the block before it by the mask; it has no ReLU."""

    def forward(self, mask: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = self.linear(hidden * mask)
        return output


class MaskedChainModel(nn.Module):
    """Blocks that pass on a mask of integers, which gets no gradient; maps (batch, 16) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(MaskedBlock() for _ in range(BLOCKS - 1)), LastMaskedBlock()])
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        return run_blocks(self.blocks, x)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return the output of the last of ``blocks``; each block takes the outputs of the previous block."""
    values: tuple[Tensor, ...] = (x,)
    for block in blocks:
        output = block(*values)
        values = output if isinstance(output, tuple) else (output,)
    return values[0]


class ChainModel(nn.Module):
    """Blocks that are called one after another, each with the previous block's output; maps (batch, 16) to itself.

    With ``skips``, each block except the last one returns two tensors, which the next block takes. With ``tied``, the
    first and the last block share one weight, and the two blocks between them share one bias.
    """

    def __init__(self, skips: bool = False, tied: bool = False) -> None:
        super().__init__()
        inner: type[Block] = SkippingBlock if skips else Block
        last: type[Block] = LastBlock if skips else Block
        self.blocks = nn.ModuleList([*(inner() for _ in range(BLOCKS - 1)), last()])
        if tied:
            first_linear, last_linear = (block.get_submodule("linear") for block in (self.blocks[0], self.blocks[-1]))
            last_linear.weight = first_linear.weight
            second_linear, third_linear = (block.get_submodule("linear") for block in self.blocks[1:3])
            third_linear.bias = second_linear.bias
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        return run_blocks(self.blocks, x)


class HeadBlock(nn.Module):
    """A linear layer whose outputs are the logits of tokens: integers that all differ for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)
        return logits


class TokenChainModel(nn.Module):
    """Blocks that are called one after another on tokens; the last block computes logits."""

    def __init__(self) -> None:
        super().__init__()
        head = HeadBlock()
        self.blocks = nn.ModuleList([*(Block(FEATURES) for _ in range(BLOCKS - 1)), head])
        make_ternary(self)
        make_logits_differ(head.linear)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TracedDropout(Dropout):
    """Dropout that keeps each mask together with its activations, which identify the micro-batch."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(draw)
        self.inputs: list[Tensor] = []

    def forward(self, activations: Tensor) -> Tensor:
        self.inputs.append(activations.detach().clone())
        return super().forward(activations)

    def forget(self) -> None:
        """Drop the kept masks and activations."""
        self.inputs.clear()
        self.masks.clear()


class DroppedBlock(nn.Module):
    """A linear layer and dropout; ``run_block`` calls them, and may recompute them in backward."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = TracedDropout(draw)
        self.run_block: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = call_block

    def forward(self, hidden: Tensor) -> Tensor:
        return self.run_block(self.compute_and_drop, hidden)

    def compute_and_drop(self, hidden: Tensor) -> Tensor:
        """Return the output of the layer with dropout."""
        dropped: Tensor = self.drop(self.linear(hidden))
        return dropped


class DroppedChainModel(nn.Module):
    """Blocks with dropout that are called one after another; maps (batch, 16) to itself.

    Each output of a layer is a sum or difference of two inputs, so that float32 holds the sums of every mask.
    """

    def __init__(self, draw: Callable[[Tensor], Tensor] = draw_mask) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppedBlock(draw) for _ in range(BLOCKS)])
        make_ternary(self)
        for name, weight in self.named_parameters():
            if name.endswith("weight"):
                signs = torch.randint(2, (WIDTH, 1)).mul(2).sub(1)
                first, second = (torch.eye(WIDTH)[torch.randperm(WIDTH)] for _ in range(2))
                weight.data.copy_(first + signs * second)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OddBlock(nn.Module):
    """A linear layer, a layer norm and a constant vector; maps (batch, inputs) to (batch, outputs)."""

    shift: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)
        self.register_buffer("shift", torch.randn(outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.norm(self.linear(hidden))) + self.shift
        return output


class ColumnBlock(nn.Module):
    """A linear layer and ReLU that returns its output and the output's first column; the next block adds them up.

    The last block has no ReLU and returns one tensor.
    """

    def __init__(self, inputs: int, outputs: int, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.is_last = is_last

    def forward(self, hidden: Tensor, column: Tensor | None = None) -> Any:
        output = self.linear(hidden if column is None else hidden + column)
        if self.is_last:
            return output
        hidden = torch.relu(output)
        return hidden, hidden[:, :1].clone()  # a view would be sent with the strides of the whole output


class OddChainModel(nn.Module):
    """Blocks of odd widths; each block takes the previous block's two outputs, which have different shapes."""

    def __init__(self) -> None:
        super().__init__()
        last = len(ODD_WIDTHS) - 2
        self.blocks = nn.ModuleList(
            [ColumnBlock(*widths, index == last) for index, widths in enumerate(pairwise(ODD_WIDTHS))]
        )
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        return run_blocks(self.blocks, x)


class RandomChainModel(nn.Module):
    """Blocks of random weights, most with an odd number of elements, and of buffers, which the seed draws too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(*widths) for widths in pairwise(ODD_WIDTHS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TiedEndsModel(nn.Module):
    """Blocks between two calls of one linear layer, whose weight and bias are tied; maps (batch, 16) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS - 2)])
        make_ternary(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.ends(x)
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.ends(hidden)
        return output


@dataclass(frozen=True)
class PipelineModel:
    """A model that pp splits: ``parts`` describes it, and ``plan`` names the modules that it calls one after another.

    ``split`` says how tp splits these modules; a model without ``split`` has no cells on tp.
    """

    name: str
    parts: str
    build: Callable[[], nn.Module]
    plan: tuple[str, ...] = PIPELINE_PLAN
    split: Mapping[str, str] = field(default_factory=dict)


PIPELINE_MODELS = (
    PipelineModel(
        "chain", "four blocks, each of which takes the output of the one before", ChainModel, split=SPLIT_BLOCKS
    ),
    PipelineModel(
        "skips",
        "four blocks, each of which takes two outputs of the last",
        partial(ChainModel, True),
        split=SPLIT_BLOCKS,
    ),
    PipelineModel(
        "tied_chain",
        "four blocks, of which the outer two have one weight and the inner two one bias",
        partial(ChainModel, tied=True),
        split=SPLIT_BLOCKS,
    ),
    PipelineModel("tied_ends", "two blocks between two calls of one layer", TiedEndsModel, TIED_ENDS_PLAN),
    PipelineModel("odd_chain", "four blocks of odd widths, whose outputs are two tensors of two shapes", OddChainModel),
    PipelineModel("masked_chain", "four blocks that pass a mask of integers on before their output", MaskedChainModel),
    PipelineModel("dropped_chain", "four blocks with dropout", DroppedChainModel, split=SPLIT_BLOCKS),
)

# Functions that draw inputs and targets, and the other fields of a ModelSpec.
TOKEN_MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        draw_tokens,
        {
            "name": "token_chain",
            "summary": "an exact model that pp splits into stages: four blocks on tokens, with a sharp cross-entropy",
            "build": TokenChainModel,
            "loss": mean_cross_entropy,
            "exact": True,
            "pp_plan": PIPELINE_PLAN,
            "tp_plan": SPLIT_BLOCKS,
        },
    ),
)
