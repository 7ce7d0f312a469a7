"""torch.optim's updates, replayed in float64 from the engine's own weights, gradients and state.

Each formula is the one in the docstring of its torch.optim class, in the order of torch's single-tensor implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zharness.errors import UsageError
from zharness.parity.bounds import Bounded

ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
SGD_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}

Update = tuple[Bounded, dict[str, Bounded]]


def adamw(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> Update:
    """One AdamW step (Loshchilov and Hutter 2019): the new weight, exp_avg and exp_avg_sq with their bounds.

    ``state`` holds ``step``, the number of steps before this one; moments that it lacks are zero.
    """
    options = ADAMW_DEFAULTS | dict(hyper)
    (beta1, beta2), lr = options["betas"], options["lr"]
    step = float(state["step"]) + 1
    w, g = Bounded.exact(weight), Bounded.exact(grad)
    m = Bounded.exact(state.get("exp_avg", torch.zeros_like(weight)))
    v = Bounded.exact(state.get("exp_avg_sq", torch.zeros_like(weight)))
    w = w * w.scalar(1 - lr * options["weight_decay"])
    m = m + w.scalar(1 - beta1) * (g - m)
    v = v * w.scalar(beta2) + w.scalar(1 - beta2) * g * g
    spread = v.sqrt() / w.scalar((1 - beta2**step) ** 0.5) + w.scalar(options["eps"])
    return w - w.scalar(lr / (1 - beta1**step)) * m / spread, {"exp_avg": m, "exp_avg_sq": v}


def sgd(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> Update:
    """One SGD step with momentum, Nesterov and weight decay: the new weight and momentum_buffer with their bounds."""
    options = SGD_DEFAULTS | dict(hyper)
    w, g = Bounded.exact(weight), Bounded.exact(grad)
    if options["weight_decay"]:
        g = g + w.scalar(options["weight_decay"]) * w
    after: dict[str, Bounded] = {}
    if options["momentum"]:
        buffer = g
        if "momentum_buffer" in state:
            kept = Bounded.exact(state["momentum_buffer"])
            buffer = w.scalar(options["momentum"]) * kept + w.scalar(1 - options["dampening"]) * g
        after["momentum_buffer"] = buffer
        g = g + w.scalar(options["momentum"]) * buffer if options["nesterov"] else buffer
    return w - w.scalar(options["lr"]) * g, after


REPLAYS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Any]], Update]] = {
    "adamw": adamw,
    "sgd": sgd,
}


def replay(name: str, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> Update:
    """One step of optimizer ``name`` on one parameter. Raises UsageError for an optimizer without a replay."""
    if name not in REPLAYS:
        raise UsageError.unknown("optimizer to replay", name, sorted(REPLAYS))
    return REPLAYS[name](weight, grad, state, hyper)
