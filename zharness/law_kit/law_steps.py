"""Describe the steps of a law for `zharness export`, which writes them as a script that calls an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.law_kit.scenarios import Scenario


class StepsKind(Enum):
    """The kinds of functions that make a law's steps.

    The kinds differ in the argument of the function, and in whether plain PyTorch makes the same steps.
    """

    SCENARIO = "scenario"  # takes a Participant; observer and judge are the same for all scenarios
    TRANSFORM = "transform"  # takes an engine, the model's spec and a batch
    OBSERVER = "observer"  # takes a RankContext
    SELF_COMPARISON = "self-comparison"  # takes a RankContext; the engine is compared with its own numbers alone


@dataclass(frozen=True)
class LawSteps:
    """The function that makes a law's steps. A law with such a function can be exported as a short script.

    ``kind`` says which argument the function takes. ``scenario`` is passed to a function of kind SCENARIO.
    ``comparison_part`` is the name of the file in zharness/export/parts that compares the engine's numbers. ``rounds``
    says that the steps round numbers even on an exact model.
    """

    function: Callable[..., Any]
    kind: StepsKind = StepsKind.OBSERVER
    scenario: Scenario | None = None
    comparison_part: str = "compare_with_plain"
    rounds: bool = False
