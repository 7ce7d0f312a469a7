"""Build the law that compares an engine with plain PyTorch in one scenario."""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.law_kit.scenario_judge import make_scenario_judge
from zharness.law_kit.scenarios import Scenario, make_scenario_observer
from zharness.parity import Tier

BACKWARD_FEATURES = (Feature.AUTOGRAD, Feature.ENGINE_BACKWARD)


def scenario_law(
    group: str,
    scenario: Scenario,
    statement: str,
    *,
    kept_because: str,
    features: tuple[Feature, ...],
    models: tuple[str, ...] = ("blocks",),
    variants: tuple[Variant, ...] = (Variant(),),
    mesh_support: MeshSupport = MeshSupport.ANY,
) -> Law:
    """Build the law of ``scenario``. The law has the name of the scenario's script."""
    return Law(
        name=f"{group}.{scenario.script.__name__}",
        statement=statement,
        tier=Tier.EXACT,
        models=models,
        observe=make_scenario_observer(scenario),
        judge=make_scenario_judge(scenario),
        kept_because=kept_because,
        features=features,
        variants=variants,
        dtypes=("fp32",),  # the models mix dtypes of their own, and their sums need more bits than narrow dtypes have
        steps=LawSteps(scenario.script, StepsKind.SCENARIO, scenario),
        setting_support=scenario.setting_support,
        mesh_support=mesh_support,
    )
