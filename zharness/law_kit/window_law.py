"""Build the law that compares an engine with plain PyTorch in scenarios of several accumulation windows."""

from __future__ import annotations

from collections.abc import Mapping

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.setting import OWNER_FEATURES, REQUIRED_FEATURES, BackwardCall
from zharness.law_kit.window_judge import make_window_judge
from zharness.law_kit.window_scenarios import WindowScenario, make_window_observer
from zharness.parity import Tier


def window_law(
    name: str,
    scenarios: Mapping[str, WindowScenario],
    statement: str,
    *,
    kept_because: str,
    features: tuple[Feature, ...] = (),
    model: str = "experts",
    dtypes: tuple[str, ...] = ("fp32",),
) -> Law:
    """Build the law ``name``, with one variant for each scenario in ``scenarios``.

    Sums of integers over several windows need more bits than bf16 and fp16 have.
    """
    return Law(
        name=name,
        statement=statement,
        tier=Tier.EXACT,
        models=(model,),
        observe=make_window_observer(scenarios),
        judge=make_window_judge(scenarios),
        kept_because=kept_because,
        features=(Feature.PARAMETERS, *features),
        variants=tuple(Variant(variant, required_features(scenario)) for variant, scenario in scenarios.items()),
        dtypes=dtypes,
    )


def required_features(scenario: WindowScenario) -> tuple[Feature, ...]:
    """Return the features that an engine has to claim for the settings of ``scenario``."""
    accumulation = (OWNER_FEATURES[scenario.owner],) if scenario.micro_batches > 1 else ()
    call = () if scenario.backward_call is BackwardCall.ENGINE else (REQUIRED_FEATURES[scenario.backward_call],)
    clip = (Feature.CLIP,) if scenario.clip is not None else ()
    no_sync = (Feature.NO_SYNC,) if scenario.in_no_sync else ()
    groups = (Feature.PARAM_GROUPS,) if scenario.groups else ()
    reading = (Feature.WINDOW_READ_OUT,) if scenario.reads_inside else ()
    return (*accumulation, *call, *clip, *no_sync, *groups, *reading, *scenario.features)
