"""The any-order law of tied, frozen and unused parameters."""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law
from zharness.law_kit.program_law import judge_any_order, observe_any_order, variants_of
from zharness.law_kit.program_templates import CHANGING_TEMPLATES
from zharness.parity import Tier

LAWS = (
    Law(
        name="parameters.any_order",
        statement="the same of a model with tied, frozen, idle and now and then unused parameters",
        tier=Tier.STAGED,
        models=("changing",),
        observe=observe_any_order,
        judge=judge_any_order,
        needs=(Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        steps_are_verbs=True,
        variants=variants_of(CHANGING_TEMPLATES),
        dtypes=("fp32",),  # the model mixes dtypes of its own: its frozen layer stays in fp32, whatever the others are
    ),
)
