"""torch.optim's updates, replayed in float64 from the engine's own weights, gradients and state.

Numbers come in with the error that they carry already: none where the engine's own are taken (a teacher-forced step),
that of all steps before where a run goes on freely (then the result is the propagated bound).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zharness.errors import UsageError
from zharness.parity.bounds import Bounded
from zharness.parity.formulas import FORMULAS, State, Update

CLASSES = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if inspect.isclass(kind)}
# Arguments that choose between implementations of one formula.
IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@cache
def defaults_of(name: str) -> Mapping[str, Any]:
    """What torch.optim's class of that name takes an argument for that is not given; what an old torch lacks is off."""
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    given = {p.name: p.default for p in parameters if p.name not in IMPLEMENTATIONS and p.name != "params"}
    return {"weight_decay": 0.0, "maximize": False, "decoupled_weight_decay": False, **given}


def propagate(
    name: str, weight: Bounded, grad: Bounded, state: State, steps: float, hyper: Mapping[str, Any]
) -> Update:
    """One step of optimizer ``name`` on one parameter after ``steps`` others, from numbers that carry errors.

    Returns the new weight and moments with their bounds. Raises UsageError for an optimizer, or an argument of it,
    that has no replay.
    """
    if name not in FORMULAS:
        raise UsageError.unknown("optimizer to replay", name, sorted(FORMULAS))
    defaults = defaults_of(name)
    for argument in hyper:
        if argument not in defaults and argument not in IMPLEMENTATIONS:
            raise UsageError.unknown(f"argument of {name} to replay", argument, sorted(defaults))
    options = {**defaults, **hyper}
    return FORMULAS[name](weight, -grad if options["maximize"] else grad, state, steps, options)


def replay(
    name: str, weight: Tensor, grad: Tensor | Bounded, state: Mapping[str, Tensor], hyper: Mapping[str, Any]
) -> Update:
    """``propagate`` from the numbers that an engine holds; ``state["step"]`` is how many steps were before this one."""
    moments = {key: Bounded.exact(value) for key, value in state.items() if key != "step"}
    bounded = grad if isinstance(grad, Bounded) else Bounded.exact(grad)
    steps = float(state.get("step", torch.zeros(())))
    return propagate(name, Bounded.exact(weight), bounded, moments, steps, hyper)
