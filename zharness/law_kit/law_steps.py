"""The steps of a law as `zharness export` writes them: what a caller does with an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.law_kit.scenarios import Scenario


class StepsKind(Enum):
    """The argument of the function that makes a law's steps, and whether plain PyTorch makes the same steps."""

    SCENARIO = "scenario"  # takes a Participant; observer and judge are the same for all scenarios
    TRANSFORM = "transform"  # takes an engine, the model's spec and a batch
    OBSERVER = "observer"  # takes a RankContext
    SELF_COMPARISON = "self-comparison"  # takes a RankContext; the engine is compared with its own numbers alone


@dataclass(frozen=True)
class LawSteps:
    """The function that makes a law's steps; a law that has one can be exported as a short script.

    ``scenario`` is the setting of a function of kind SCENARIO. ``comparison_part`` names the file in
    zharness/export/parts that compares the engine's numbers. ``rounds`` marks steps that round even on an exact model.
    """

    function: Callable[..., Any]
    kind: StepsKind = StepsKind.OBSERVER
    scenario: Scenario | None = None
    comparison_part: str = "compare_with_plain"
    rounds: bool = False
