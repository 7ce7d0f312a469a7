"""Define stand-ins for models, in which the sums that cp and ep split round nothing for any weights.

Optimizers give weights that are no integers, and bf16 has eight bits. So a law that trains several steps, or trains
under autocast, needs a model in which no sum that an axis splits is rounded. In these models a token picks one element
of each row of a weight, and the loss is linear in the picked elements. Then a sum in a forward has only one nonzero
term and a bias, and a sum in a gradient has integers over powers of two. On ep only the tokens of the experts pick
elements; the output of the experts is added to the output of the original model. On cp all tokens pick elements,
because each part of a sequence contributes to the gradients of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.workload import stand_ins
from zharness.workload.causal_attention import SPLIT, CausalAttention
from zharness.workload.exact_blocks import CastingLinear, OneOddParameterModel
from zharness.workload.exact_heads import HEADS, token_loss
from zharness.workload.exact_layers import AdaptedModel
from zharness.workload.exact_mlp import WIDTH, linear_loss, random_ternary
from zharness.workload.exact_routed import EXPERT_PLAN, EXPERTS, LOGIT, ExpertLayer
from zharness.workload.mixed_precision import (
    HIDDEN,
    ExactMixedPrecisionModel,
    MixedPrecisionModel,
    Scale,
    pass_through,
)
from zharness.workload.nets import FEATURES, MLP, OUTPUTS, StatefulModel
from zharness.workload.stand_ins import TOKENS, ContextMixin, combine, draw_sequences

PICKED = 8  # columns of the layers of ``PickingContext``


def pick_one(x: Tensor, width: int) -> Tensor:
    """Return rows of ``width`` columns that are 0 except for a 1 in the column of the row's largest feature."""
    return nn.functional.one_hot(x.detach().argmax(dim=-1), width).to(x.dtype)


class PickingExperts(ExpertLayer):
    """A layer of experts with a frozen gate; a token with one 1 goes to the expert of the 1's column modulo 4."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = CastingLinear(WIDTH, EXPERTS, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.gate.weight.zero_()
            for column in range(WIDTH):
                self.gate.weight[column % EXPERTS, column] = LOGIT


class PickingExpertsMixin(nn.Module):
    """Adds the output of a layer of experts, which the input chooses, to the output of the next base class."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = PickingExperts()

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        output: Tensor = super().forward(x, *args, **options)
        routed: Tensor = self.moe(pick_one(x, WIDTH))
        return output + routed[..., : output.shape[-1]].to(output.dtype)


def attend_to_one(attention: nn.Module, x: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` plus the output of attention: the value of the one token that the last columns of ``x`` name.

    The last TOKENS columns encode the place of a token, and the TOKENS columns before them encode the place of the
    token that it sees. Heads share the columns of ``value``.
    """
    codes = x.detach()[..., -2 * TOKENS :].unsqueeze(2).expand(-1, -1, HEADS, -1)
    padded = nn.functional.pad(value, (0, -value.shape[-1] % HEADS))
    heads = padded.view(*padded.shape[:-1], HEADS, -1)
    added: Tensor = attention(codes[..., :TOKENS], codes[..., TOKENS:], heads)
    return value + added.flatten(2)[..., : value.shape[-1]].to(value.dtype)


class PickingContext(nn.Module):
    """Three layers, of each of which a token picks a column, and attention; maps (batch, 4, 20) to (batch, 4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, PICKED)
        self.second = nn.Linear(FEATURES, PICKED, bias=False)
        self.last = nn.Linear(FEATURES, PICKED)
        self.attention = CausalAttention()

    def forward(self, x: Tensor) -> Tensor:
        picked = pick_one(x[..., :FEATURES], FEATURES)
        value = self.first(picked) + self.second(picked.roll(1, -1)) + self.last(picked.flip(-1))
        return attend_to_one(self.attention, x, value + x[..., :PICKED])


class CastingScale(Scale):
    """A Scale that casts its weight to the dtype of its input, because a frozen weight may keep fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class PickingMixed(ExactMixedPrecisionModel):
    """The model ``ExactMixedPrecisionModel`` with attention, whose first and last layers each pick by the input.

    The elements that the first layer picks reach the output through a frozen layer, in which each output has one input.
    So no gradient depends on a weight that a step moves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalAttention()
        self.norm = cast(nn.LayerNorm, CastingScale(HIDDEN))
        self.inner = CastingLinear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        columns = torch.randint(HIDDEN, (HIDDEN,))
        with torch.no_grad():
            self.inner.weight.copy_(nn.functional.one_hot(columns, HIDDEN))
        self.first.reset_parameters()
        self.last.reset_parameters()

    def forward(self, x: Tensor, transform: Callable[[Tensor], Tensor] = pass_through) -> Tensor:
        picked = pick_one(x[..., :FEATURES], FEATURES)
        inner = self.run_inner(self.run_norm(picked, transform), x.dtype)
        output: Tensor = self.last(picked[..., :HIDDEN])
        return attend_to_one(self.attention, x, output + inner[..., :OUTPUTS].to(output.dtype))


def draw_rows(features: int, outputs: int, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw normally distributed inputs of ``features`` columns, and targets in {-1, 0, 1}."""
    return torch.randn(samples, features, generator=generator), random_ternary((samples, outputs), generator)


def draw_seeded_rows(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Draw inputs and targets as ``draw_rows`` does, and a seed for the dropout in the forward."""
    return *draw_rows(FEATURES, OUTPUTS, samples, generator), int(torch.randint(1 << 30, (), generator=generator))


def draw_sequences_that_see_one(
    features: int, outputs: int, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw normally distributed inputs, with the places of tokens in their last columns, and targets in {-1, 0, 1}.

    Each token sees itself or one before it.
    """
    inputs = torch.randn(samples, TOKENS, features, generator=generator)
    places = torch.arange(TOKENS).expand(samples, -1)
    seen = (torch.rand(samples, TOKENS, generator=generator) * (places + 1)).long()
    codes = [nn.functional.one_hot(each, TOKENS).float() for each in (seen, places)]
    return torch.cat([inputs, *codes], dim=-1), random_ternary((samples, TOKENS, outputs), generator)


class PickingAdapted(AdaptedModel):
    """The model ``AdaptedModel``, whose adapter reads one number, with attention; bf16 holds every sum of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalAttention()
        with torch.no_grad():
            columns = torch.randint(self.down.in_features, (self.down.out_features,))
            self.down.weight.copy_(nn.functional.one_hot(columns, self.down.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return attend_to_one(self.attention, x, super().forward(pick_one(x[..., :WIDTH], WIDTH)))


class OddOneModel(OneOddParameterModel):
    """The model ``OneOddParameterModel`` with a parameter of one element."""

    def __init__(self) -> None:
        super().__init__("one")


def make_spec(
    draw: Any, build: type[nn.Module], stands_in_for: str, splits_exactly: bool = True, **fields: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Return the draw function of a model, and the fields of its ModelSpec."""
    on_context = "cp_plan" in fields
    axis, parts = ("context", "attention") if on_context else ("routed", "a layer of experts")
    return draw, {
        "name": f"{stands_in_for}_{axis}",
        "summary": f"the layers of the model {stands_in_for}, with {parts}, of which an axis splits no sum that rounds",
        "build": build,
        "loss": token_loss if on_context else linear_loss,
        "stands_in_for": stands_in_for,
        "splits_exactly": splits_exactly,
        **fields,
    }


ON_EP: Mapping[str, Any] = {"ep_plan": EXPERT_PLAN}
# The draw function and the fields of ModelSpec of each model, also for the models of ``stand_ins``.
MODELS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    *stand_ins.MODELS,
    make_spec(partial(draw_sequences_that_see_one, FEATURES, PICKED), PickingContext, "mlp", **SPLIT),
    make_spec(partial(draw_sequences_that_see_one, FEATURES, OUTPUTS), PickingMixed, "mixed", **SPLIT),
    make_spec(partial(draw_sequences_that_see_one, WIDTH, WIDTH), PickingAdapted, "adapted", **SPLIT),
    make_spec(draw_sequences, combine(ContextMixin, OddOneModel), "odd_one", False, exact=True, **SPLIT),
    make_spec(partial(draw_rows, FEATURES, OUTPUTS), combine(PickingExpertsMixin, MLP), "mlp", **ON_EP),
    make_spec(
        partial(draw_rows, FEATURES, OUTPUTS), combine(PickingExpertsMixin, MixedPrecisionModel), "mixed", **ON_EP
    ),
    make_spec(partial(draw_rows, WIDTH, WIDTH), combine(PickingExpertsMixin, AdaptedModel), "adapted", **ON_EP),
    make_spec(draw_seeded_rows, combine(PickingExpertsMixin, StatefulModel), "stateful", **ON_EP),
)
