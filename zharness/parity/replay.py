"""Compute the updates of torch.optim in float64 from weights, gradients and optimizer state with error bounds.

With teacher forcing, each step starts from the engine's own numbers, and their errors are zero. In a run that continues
from its own results, the inputs carry the errors of all earlier steps, and the result carries the bound that follows
from these errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zharness.errors import UsageError
from zharness.parity.bounds import BoundedTensor
from zharness.parity.formulas import FORMULAS, State, Update

OPTIMIZER_CLASSES = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if inspect.isclass(kind)}
# Arguments that choose an implementation and do not change the formula.
IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@cache
def optimizer_defaults(name: str) -> Mapping[str, Any]:
    """Return the default arguments of torch.optim's class ``name``. An option that this release lacks is False or 0."""
    parameters = inspect.signature(OPTIMIZER_CLASSES[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in IMPLEMENTATION_OPTIONS and p.name != "params"}
    return {"weight_decay": 0.0, "maximize": False, "decoupled_weight_decay": False, **defaults}


def propagate_step(
    name: str,
    weight: BoundedTensor,
    grad: BoundedTensor,
    state: State,
    steps: float,
    hyperparameters: Mapping[str, Any],
) -> Update:
    """Take one step of the optimizer ``name`` on one parameter, from numbers that carry error bounds.

    ``steps`` is the number of earlier steps. Returns the new weight and the new state with their bounds. Raises
    UsageError if the optimizer, or one of the ``hyperparameters``, has no formula.
    """
    if name not in FORMULAS:
        raise UsageError.unknown_name("optimizer to replay", name, sorted(FORMULAS))
    defaults = optimizer_defaults(name)
    for argument in hyperparameters:
        if argument not in defaults and argument not in IMPLEMENTATION_OPTIONS:
            raise UsageError.unknown_name(f"argument of the optimizer {name}:", argument, sorted(defaults))
    options = {**defaults, **hyperparameters}
    return FORMULAS[name](weight, -grad if options["maximize"] else grad, state, steps, options)


def replay_step(
    name: str,
    weight: Tensor,
    grad: Tensor | BoundedTensor,
    state: Mapping[str, Tensor],
    hyperparameters: Mapping[str, Any],
) -> Update:
    """Take one step from an engine's weight, gradient and state; ``state["step"]`` is the number of earlier steps."""
    moments = {key: BoundedTensor.exact(value) for key, value in state.items() if key != "step"}
    bounded = grad if isinstance(grad, BoundedTensor) else BoundedTensor.exact(grad)
    steps = float(state.get("step", torch.zeros(())))
    return propagate_step(name, BoundedTensor.exact(weight), bounded, moments, steps, hyperparameters)
