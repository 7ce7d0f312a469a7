"""Define functions and constants that several laws of the group ``training`` use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison, Tier

ALL_MODELS = ("mlp", "transformer", "conv", "exact", "fused")

ObserveFunction = Callable[[RankContext], None]

JudgeFunction = Callable[[JudgeContext], Iterator[Comparison]]

MODELS = ("mlp", "transformer")

STEPS = 2


def variation_law(name: str, statement: str, observe: ObserveFunction, judge: JudgeFunction, **law_fields: Any) -> Law:
    """Build a law of the group ``training`` that varies the way in which a model is trained.

    ``law_fields`` are further fields of Law.
    """
    fields = {
        "tier": Tier.STAGED,
        "models": MODELS[:1],
        **law_fields,
        "features": (Feature.VARIATIONS, *law_fields.get("features", ())),
    }
    return Law(name=f"training.{name}", statement=statement, observe=observe, judge=judge, **fields)
