"""Which laws have a short script, and the steps of each: what a caller does with an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zharness.checks import Check
from zharness.checks.play import Scene, observing
from zharness.checks.torch_func import observing as transforming
from zharness.engines import registry


class Kind(Enum):
    """How a law's steps are told."""

    PLAY = "play"  # a function of a Side; the rest is the same for all plays
    TRANSFORM = "transform"  # a function of an engine and a batch
    STEPS = "steps"  # a function of a Bench
    OWN = "own"  # the same, and the engine is held against its own numbers, with no plain side


@dataclass(frozen=True)
class Steps:
    """The function that tells a law's steps; ``scene`` is the setting of a play.

    ``beside`` is the part of the script that tells what the engine is held against.
    """

    kind: Kind
    function: Callable[..., Any]
    scene: Scene | None = None
    beside: str = "beside"


# Of those whose observer is a function of its own, these have a plain side in the script: everything that they record
# is a value, a gradient, a weight or an optimizer's state.
DIRECT = (
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
OWN = {"state.resume": "own_resume", "state.refuse_pickle": "own_refuse"}
UNSAVED = ("ddp", "zero1")  # saving is their caller's


def steps_of(check: Check) -> Steps | None:
    """The steps of ``check``; None where its judge alone can tell what is right."""
    observe = check.observe
    held = inspect.getclosurevars(observe).nonlocals
    if observe.__qualname__ == f"{observing.__qualname__}.<locals>.observe":
        if observe.__module__ == observing.__module__:
            return Steps(Kind.PLAY, held["scene"].play, held["scene"])
        if observe.__module__ == transforming.__module__:
            return Steps(Kind.TRANSFORM, held["transform"])
    if check.name in OWN:
        return Steps(Kind.OWN, observe, beside=OWN[check.name])
    return Steps(Kind.STEPS, observe) if check.name in DIRECT else None


def told_whole(check: Check, dtype: str, engine: str = "") -> str:
    """Why a script of ``check`` in ``dtype`` on ``engine`` holds the law's own judge, which is long.

    Nothing where plain PyTorch's side is told in a few lines, on some engine.
    """
    if steps_of(check) is None:
        return "what it looks at is more than values, gradients, weights and an optimizer's state"
    if engine and check.name in OWN and registry.split(engine)[0] in UNSAVED:
        return f"on {engine} what saves its state is its caller's"
    return "" if dtype in ("fp32", "bf16") else f"in {dtype} losses are scaled"
