"""Build the law of one scenario."""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law
from zharness.law_kit.scenario_judge import make_scenario_judge
from zharness.law_kit.scenarios import Scenario, make_scenario_observer
from zharness.parity import Tier


def scenario_law(
    name: str,
    statement: str,
    scenario: Scenario,
    needs: tuple[Feature, ...],
    model: str = "blocks",
    variants: tuple[tuple[str, tuple[Feature, ...]], ...] = (("", ()),),
) -> Law:
    """The check of one play."""
    return Law(
        name=name,
        statement=statement,
        tier=Tier.EXACT,
        models=(model,),
        observe=make_scenario_observer(scenario),
        judge=make_scenario_judge(scenario),
        needs=needs,
        variants=variants,
        dtypes=("fp32",),  # its models mix dtypes of their own, and hold more than a narrow significand does
    )


BACKWARD_FEATURES = (Feature.AUTOGRAD, Feature.ENGINE_BACKWARD, Feature.TENSOR_BACKWARD)
