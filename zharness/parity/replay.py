"""torch.optim's updates, replayed in float64 from the engine's own weights, gradients and state.

Each formula is the one in the docstring of its torch.optim class, in the order of torch's single-tensor implementation.
Numbers come in with the error that they carry already: none where the engine's own are taken (a teacher-forced step),
that of all steps before where a run goes on freely (then the result is the propagated bound).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.errors import UsageError
from zharness.parity.bounds import Bounded

COMMON: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "maximize": False}
ADAM: dict[str, Any] = {**COMMON, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
ADAMW: dict[str, Any] = {**ADAM, "weight_decay": 1e-2}
SGD: dict[str, Any] = {**COMMON, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
# Arguments that choose between implementations of one formula.
IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})

State = Mapping[str, Bounded]
Update = tuple[Bounded, dict[str, Bounded]]


def adam(decoupled: bool, w: Bounded, g: Bounded, state: State, steps: float, options: Mapping[str, Any]) -> Update:
    """One step of Adam (Kingma and Ba 2015), AMSGrad (Reddi et al. 2018) or AdamW (Loshchilov and Hutter 2019).

    The new weight, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq; moments that ``state`` lacks are zero.
    """
    (beta1, beta2), lr, decay = options["betas"], options["lr"], options["weight_decay"]
    step, zero = steps + 1, w.zero()
    if decay and decoupled:
        w = w * w.scalar(1 - lr * decay)
    elif decay:
        g = g + w.scalar(decay) * w
    m, v = state.get("exp_avg", zero), state.get("exp_avg_sq", zero)
    m = m + w.scalar(1 - beta1) * (g - m)
    v = v * w.scalar(beta2) + w.scalar(1 - beta2) * g * g
    after = {"exp_avg": m, "exp_avg_sq": v}
    if options["amsgrad"]:
        v = after["max_exp_avg_sq"] = v.maximum(state.get("max_exp_avg_sq", zero))
    spread = v.sqrt() / w.scalar((1 - beta2**step) ** 0.5) + w.scalar(options["eps"])
    return w - w.scalar(lr / (1 - beta1**step)) * m / spread, after


def sgd(w: Bounded, g: Bounded, state: State, _steps: float, options: Mapping[str, Any]) -> Update:
    """One SGD step with weight decay, momentum, dampening and Nesterov: the new weight and momentum_buffer."""
    if options["weight_decay"]:
        g = g + w.scalar(options["weight_decay"]) * w
    after: dict[str, Bounded] = {}
    if options["momentum"]:
        buffer = g
        if "momentum_buffer" in state:
            fresh = g if not options["dampening"] else w.scalar(1 - options["dampening"]) * g
            buffer = w.scalar(options["momentum"]) * state["momentum_buffer"] + fresh
        after["momentum_buffer"] = buffer
        g = g + w.scalar(options["momentum"]) * buffer if options["nesterov"] else buffer
    return w - w.scalar(options["lr"]) * g, after


Formula = Callable[[Bounded, Bounded, State, float, Mapping[str, Any]], Update]
REPLAYS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "adam": (partial(adam, False), ADAM),
    "adamw": (partial(adam, True), ADAMW),
    "sgd": (sgd, SGD),
}


def propagate(
    name: str, weight: Bounded, grad: Bounded, state: State, steps: float, hyper: Mapping[str, Any]
) -> Update:
    """One step of optimizer ``name`` on one parameter after ``steps`` others, from numbers that carry errors.

    Returns the new weight and moments with their bounds. Raises UsageError for an optimizer, or an argument of it,
    that has no replay.
    """
    if name not in REPLAYS:
        raise UsageError.unknown("optimizer to replay", name, sorted(REPLAYS))
    formula, defaults = REPLAYS[name]
    for argument in hyper:
        if argument not in defaults and argument not in IMPLEMENTATIONS:
            raise UsageError.unknown(f"argument of {name} to replay", argument, sorted(defaults))
    options = defaults | dict(hyper)
    return formula(weight, -grad if options["maximize"] else grad, state, steps, options)


def replay(
    name: str, weight: Tensor, grad: Tensor | Bounded, state: Mapping[str, Tensor], hyper: Mapping[str, Any]
) -> Update:
    """``propagate`` from the numbers that an engine holds; ``state["step"]`` is how many steps were before this one."""
    moments = {key: Bounded.exact(value) for key, value in state.items() if key != "step"}
    bounded = grad if isinstance(grad, Bounded) else Bounded.exact(grad)
    steps = float(state.get("step", torch.zeros(())))
    return propagate(name, Bounded.exact(weight), bounded, moments, steps, hyper)
