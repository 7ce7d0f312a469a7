"""Define the stand-ins of models where cp splits a sequence, ep splits experts, or tp splits sums.

A model with one row for each sample has neither a sequence nor experts. Its stand-in has the same layers, options and
attributes, so that the laws of the model run on it. In addition, the stand-in has attention without parameters after
these layers, or a layer of experts beside them. Attention adds tokens with scores of -1, 0 or 1, which have no
gradient. The sign of a token's first feature chooses its expert, the first or the third. The expert's softmax is 1, and
the gate is frozen. So several optimizer steps with a learning rate of 1 stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.workload import exact_stateful, mixed_precision
from zharness.workload.causal_attention import SPLIT, CausalAttention
from zharness.workload.exact_blocks import (
    Block,
    BlocksModel,
    BranchingModel,
    ExpertsModel,
    GatedModel,
    OddParametersModel,
    SimilarLayersModel,
    call_block,
    first_output,
    make_ternary,
)
from zharness.workload.exact_heads import HEADS, token_loss
from zharness.workload.exact_mlp import WIDTH, linear_loss, random_ternary
from zharness.workload.exact_routed import EXPERT_PLAN, EXPERTS, LOGIT, ExpertLayer, draw_parts

TOKENS = 4
ZEROS = 3  # of four inputs, so that sums over tokens stay small


def attend(attention: nn.Module, scored: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` plus the output of attention, with the signs of the features of ``scored`` as query and key.

    The shapes are (batch, tokens, features). Each head has all features of the value.
    """
    signs = scored.detach()[..., :HEADS].sign().unsqueeze(-1)
    added: Tensor = attention(signs, signs, value.unsqueeze(2).expand(-1, -1, HEADS, -1))
    return value + added.sum(dim=2)


def combine(mixin: type[nn.Module], model: type[nn.Module]) -> type[nn.Module]:
    """Return a class of ``model`` whose forward also runs the addition of ``mixin``."""
    name = f"{mixin.__name__.removesuffix('Mixin')}{model.__name__}"
    return cast(type[nn.Module], type(name, (mixin, model), {"__doc__": f"{model.__doc__}", "__module__": __name__}))


class ContextMixin(nn.Module):
    """Applies attention to the output of the model that is the next base class."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalAttention()

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return attend(self.attention, x, super().forward(x, *args, **options))


class ContextBlocks(BlocksModel):
    """The model ``BlocksModel`` for (batch, 4, 16), with attention at the end of the block, which may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalAttention()

    def block(self, hidden: Tensor) -> Tensor:
        """Apply the block and attention."""
        return attend(self.attention, hidden, super().block(hidden))


class PinnedExperts(ExpertLayer):
    """A layer of experts with a frozen gate: the sign of the first feature chooses the first or the third expert."""

    def __init__(self) -> None:
        super().__init__()
        make_ternary(self)
        self.gate.requires_grad_(False)
        with torch.no_grad():
            self.gate.weight.zero_()
            # The softmax is also 1 for absolute values.
            self.gate.weight[0, 0], self.gate.weight[EXPERTS // 2, 0] = 2 * LOGIT, -LOGIT


class RoutedMixin(nn.Module):
    """Adds the output of a layer of experts to the output of the model that is the next base class."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = PinnedExperts()

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(x, *args, **options) + self.moe(x)


class RoutedBlocks(BlocksModel):
    """The model ``BlocksModel`` with a layer of experts, whose output is added to the output of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = PinnedExperts()

    def forward(
        self,
        x: Tensor,
        run_block: Callable[[Block, Tensor], Tensor] = call_block,
        pack: Callable[[Tensor, Tensor], Any] = first_output,
        with_dropout: bool = False,
    ) -> Any:
        routed = self.moe(x)
        if pack is first_output:
            return super().forward(x, run_block, with_dropout=with_dropout) + routed
        return super().forward(x, run_block, lambda output, extra: pack(output + routed, extra), with_dropout)


def draw_sequences(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets in {-1, 0, 1}, most of which are 0."""
    shape = (samples, TOKENS, WIDTH)
    kept = torch.randint(ZEROS + 1, shape, generator=generator) == ZEROS
    return random_ternary(shape, generator) * kept, random_ternary(shape, generator)


# The models to whose output a mixin adds. The model of blocks has classes of its own, because the addition is a part of
# the block, which may be recomputed.
COMBINED: Mapping[str, type[nn.Module]] = {
    "changing": BranchingModel,
    "experts": ExpertsModel,
    "gated": GatedModel,
    "odd": OddParametersModel,
    "similar": SimilarLayersModel,
}
CONTEXT_CLASSES = {"blocks": ContextBlocks, **{name: combine(ContextMixin, each) for name, each in COMBINED.items()}}
ROUTED_CLASSES = {"blocks": RoutedBlocks, **{name: combine(RoutedMixin, each) for name, each in COMBINED.items()}}

# The draw function and the fields of ModelSpec of each model.
MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        mixed_precision.draw_integers,
        {
            "name": "mixed_exact",
            "summary": "the model mixed with small integers, which bf16 holds, and without functions that round",
            "build": mixed_precision.ExactMixedPrecisionModel,
            "loss": linear_loss,
            "exact": True,
            "stands_in_for": "mixed",
            "tp_plan": mixed_precision.TENSOR_PLAN,
        },
    ),
    (
        exact_stateful.draw_seeded_integers,
        {
            "name": "stateful_exact",
            "summary": "the model stateful with integers, of which batch norm passes those above the mean",
            "build": exact_stateful.ExactStatefulModel,
            "loss": linear_loss,
            "exact": True,
            "stands_in_for": "stateful",
            "tp_plan": exact_stateful.TENSOR_PLAN,
        },
    ),
    *(
        (
            draw_sequences,
            {
                "name": f"{name}_context",
                "summary": f"the model {name} with attention behind its layers, whose sequence cp splits",
                "build": build,
                "loss": token_loss,
                "exact": True,
                "stands_in_for": name,
                **SPLIT,
            },
        )
        for name, build in CONTEXT_CLASSES.items()
    ),
    *(
        (
            draw_parts,
            {
                "name": f"{name}_routed",
                "summary": f"the model {name} with a layer of experts beside its layers, which ep splits",
                "build": build,
                "loss": linear_loss,
                "exact": True,
                "stands_in_for": name,
                "ep_plan": EXPERT_PLAN,
            },
        )
        for name, build in ROUTED_CLASSES.items()
    ),
)
