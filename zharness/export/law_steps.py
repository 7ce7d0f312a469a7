"""Decide which laws have a short script, and explain why another law's script is long."""

from __future__ import annotations

from zharness.engines import registry
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.laws import Law

ENGINES_WITHOUT_SAVE = ("ddp", "zero1")  # engines that leave saving to their caller


def is_self_comparison(steps: LawSteps | None) -> bool:
    """Return whether a script of these steps compares the engine with its own numbers alone."""
    return steps is not None and steps.kind is StepsKind.SELF_COMPARISON


def explain_long_script(law: Law, dtype: str, engine: str = "") -> str:
    """Return why a script of ``law`` in ``dtype`` on ``engine`` contains the law's own judge, which is long.

    Return "" if a few lines of plain PyTorch are enough. If ``engine`` is empty, it must hold on some engine.
    """
    if law.steps is None:
        return "it compares more than values, gradients, weights and an optimizer's state"
    if engine and is_self_comparison(law.steps) and registry.split_release(engine)[0] in ENGINES_WITHOUT_SAVE:
        return f"{engine} leaves saving its state to its caller"
    return "" if dtype in ("fp32", "bf16") else f"in {dtype} losses are scaled"
