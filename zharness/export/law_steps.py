"""Which laws have a short script, and the function with the steps of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.engines import registry
from zharness.law_kit.scenarios import Scenario, make_scenario_observer
from zharness.laws import Law
from zharness.laws.torch_func import make_transform_observer


class StepsKind(Enum):
    """How a law's steps are told."""

    SCENARIO = "play"  # a function of a Side; the rest is the same for all plays
    TRANSFORM = "transform"  # a function of an engine and a batch
    STEPS = "steps"  # a function of a Bench
    SELF_COMPARISON = "own"  # the same, and the engine is held against its own numbers, with no plain side


@dataclass(frozen=True)
class LawSteps:
    """The function that tells a law's steps; ``scene`` is the setting of a play.

    ``beside`` is the part of the script that tells what the engine is held against.
    """

    kind: StepsKind
    function: Callable[..., Any]
    scenario: Scenario | None = None
    comparison_part: str = "compare_with_plain"


# Of those whose observer is a function of its own, these have a plain side in the script: everything that they record
# is a value, a gradient, a weight or an optimizer's state.
LAWS_WITH_PLAIN_SIDE = (
    "training.grads",
    "training.one_hot_rank",
    "training.trajectory",
    "training.optimizers",
    "training.accumulation",
    "training.loss_scale_power",
    "training.sum_or_mean",
    "training.no_sync",
    "training.several_backwards",
    "training.clip_and_norm",
    "training.forward_alone",
    "training.config_invariance",
    "double_backward.retained_then_zero_grad",
    "parameters.stay_put",
    "parameters.unfrozen",
    "model.configured",
)
# Those that hold the engine against itself, and the part of the script that says how.
SELF_COMPARING_LAWS = {"state.resume": "compare_resumed", "state.refuse_pickle": "compare_refused_load"}
ENGINES_WITHOUT_SAVE = ("ddp", "zero1")  # saving is their caller's


def get_law_steps(check: Law) -> LawSteps | None:
    """The steps of ``check``; None where its judge alone can tell what is right."""
    observe = check.observe
    held = inspect.getclosurevars(observe).nonlocals
    if observe.__qualname__ == f"{make_scenario_observer.__qualname__}.<locals>.observe":
        return LawSteps(StepsKind.SCENARIO, held["scenario"].script, held["scenario"])
    if observe.__qualname__ == f"{make_transform_observer.__qualname__}.<locals>.observe":
        return LawSteps(StepsKind.TRANSFORM, held["transform"])
    if check.name in SELF_COMPARING_LAWS:
        return LawSteps(StepsKind.SELF_COMPARISON, observe, comparison_part=SELF_COMPARING_LAWS[check.name])
    return LawSteps(StepsKind.STEPS, observe) if check.name in LAWS_WITH_PLAIN_SIDE else None


def explain_long_script(check: Law, dtype: str, engine: str = "") -> str:
    """Why a script of ``check`` in ``dtype`` on ``engine`` holds the law's own judge, which is long.

    Nothing where plain PyTorch's side is told in a few lines, on some engine.
    """
    if get_law_steps(check) is None:
        return "what it looks at is more than values, gradients, weights and an optimizer's state"
    if engine and check.name in SELF_COMPARING_LAWS and registry.split_release(engine)[0] in ENGINES_WITHOUT_SAVE:
        return f"on {engine} what saves its state is its caller's"
    return "" if dtype in ("fp32", "bf16") else f"in {dtype} losses are scaled"
