"""The any-order law of ordinary training."""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law
from zharness.law_kit.program_law import judge_any_order, observe_any_order, variants_of
from zharness.law_kit.program_templates import MLP_TEMPLATES
from zharness.parity import Tier

LAWS = (
    Law(
        name="training.any_order",
        statement="in whatever legal order a caller calls, each call does what plain PyTorch's does",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_any_order,
        judge=judge_any_order,
        needs=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        steps_are_verbs=True,
        variants=variants_of(MLP_TEMPLATES),
    ),
)
