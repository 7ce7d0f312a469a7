"""Decide whether the script of a law is short or long, and explain why a script is long."""

from __future__ import annotations

from zharness.engines import registry
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.laws import Law

ENGINES_WITHOUT_SAVE = ("ddp", "zero1")  # engines that leave saving to their caller


def is_self_comparison(steps: LawSteps | None) -> bool:
    """Return whether a script with these steps compares the engine only with the engine's own numbers."""
    return steps is not None and steps.kind is StepsKind.SELF_COMPARISON


def explain_long_script(law: Law, dtype: str, engine: str = "") -> str:
    """Return the reason why a script of ``law`` in ``dtype`` on ``engine`` has to contain the law's own judge.

    Return "" if a few lines of plain PyTorch are enough, so that the script is short. If ``engine`` is empty, return ""
    if the script is short on at least one engine.
    """
    if law.steps is None:
        return "the law compares more than values, gradients, weights and optimizer state"
    if engine and is_self_comparison(law.steps) and registry.split_release(engine)[0] in ENGINES_WITHOUT_SAVE:
        return f"{engine} does not save checkpoints itself"
    return "" if dtype in ("fp32", "bf16") else f"in {dtype} losses are scaled"
