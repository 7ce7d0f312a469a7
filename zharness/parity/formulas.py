"""The update formulas of torch.optim's elementwise optimizers, in the order of torch's single-tensor implementation.

Each formula takes a parameter, its gradient and its optimizer state (each with an error bound), the number of earlier
steps and all options of the optimizer. Each formula returns the new weight and the new state. State that is not passed
starts from torch's initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from zharness.parity.bounds import BoundedTensor, gamma

State = Mapping[str, BoundedTensor]
Update = tuple[BoundedTensor, dict[str, BoundedTensor]]
Options = Mapping[str, Any]


def add_weight_decay(w: BoundedTensor, g: BoundedTensor, options: Options) -> BoundedTensor:
    """Return the gradient plus the weight times ``options["weight_decay"]``, the gradient of an L2 penalty."""
    decay = options["weight_decay"]
    return g + w.scalar(decay) * w if decay else g


def apply_weight_decay(
    w: BoundedTensor, g: BoundedTensor, options: Options, decoupled: bool
) -> tuple[BoundedTensor, BoundedTensor]:
    """Return the weight and the gradient after weight decay.

    With ``decoupled``, the weight is multiplied by 1 - lr * weight_decay; otherwise the decay is added to the gradient.
    """
    if decoupled and options["weight_decay"]:
        return w * w.scalar(1 - options["lr"] * options["weight_decay"]), g
    return w, add_weight_decay(w, g, options)


def update_moments(
    w: BoundedTensor, g: BoundedTensor, state: State, options: Options
) -> tuple[BoundedTensor, BoundedTensor]:
    """Return Adam's running averages ``exp_avg`` and ``exp_avg_sq``, updated with the gradient ``g``."""
    (beta1, beta2), zero = options["betas"], w.zero()
    m, v = state.get("exp_avg", zero), state.get("exp_avg_sq", zero)
    return (
        m + complement(w, 1 - beta1, beta1, options) * (g - m),
        v * w.scalar(beta2) + complement(w, 1 - beta2, beta2, options) * g * g,
    )


def complement(w: BoundedTensor, number: float, beta: float, options: Options, power: float = 1) -> BoundedTensor:
    """Return ``number``, which was computed from 1 - ``beta`` to the ``power``, as a scalar.

    torch's fused kernels for CUDA subtract in float32 (fused_adam_utils.cuh), in which the power is already rounded.
    """
    exact = w.scalar(number)
    if not (options.get("fused") and w.value.is_cuda):
        return exact
    relative = beta**power / (1 - beta**power) * gamma(int(power) + 1, torch.float32)
    return BoundedTensor(exact.value, exact.error + exact.value.abs() * relative, exact.dtype)


def update_mean_square(w: BoundedTensor, g: BoundedTensor, v: BoundedTensor, beta: float) -> BoundedTensor:
    """Return ``beta`` times ``v``, the running average of squared gradients, plus 1 - ``beta`` times ``g`` squared."""
    return v * w.scalar(beta) + w.scalar(1 - beta) * g * g


def adam(decoupled: bool, w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of Adam (Kingma and Ba 2015), AMSGrad (Reddi et al. 2018) or AdamW (Loshchilov and Hutter 2019)."""
    (beta1, beta2), lr, step = options["betas"], options["lr"], steps + 1
    w, g = apply_weight_decay(w, g, options, decoupled or options["decoupled_weight_decay"])
    m, v = update_moments(w, g, state, options)
    after = {"exp_avg": m, "exp_avg_sq": v}
    if options["amsgrad"]:
        v = after["max_exp_avg_sq"] = v.maximum(state.get("max_exp_avg_sq", w.zero()))
    spread = v.sqrt() / complement(w, (1 - beta2**step) ** 0.5, beta2, options, step) + w.scalar(options["eps"])
    return w - complement(w, lr / (1 - beta1**step), beta1, options, step) * m / spread, after


def nadam(w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of Adam with Nesterov momentum and its own momentum schedule (Dozat 2016)."""
    (beta1, beta2), lr, step = options["betas"], options["lr"], steps + 1
    w, g = apply_weight_decay(w, g, options, options["decoupled_weight_decay"])
    mu, next_mu = (beta1 * (1 - 0.5 * 0.96 ** (at * options["momentum_decay"])) for at in (step, step + 1))
    one = w.scalar_one()
    product = state.get("mu_product", one) * w.scalar(mu)
    m, v = update_moments(w, g, state, options)
    spread = (v / w.scalar(1 - beta2**step)).sqrt() + w.scalar(options["eps"])
    now = w.scalar(lr * (1 - mu)) / (one - product)
    ahead = w.scalar(lr * next_mu) / (one - product * w.scalar(next_mu))
    return w - now * g / spread - ahead * m / spread, {"mu_product": product, "exp_avg": m, "exp_avg_sq": v}


def radam(w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of Adam whose learning rate is rectified in the first steps (Liu et al. 2020)."""
    (beta1, beta2), step = options["betas"], steps + 1
    w, g = apply_weight_decay(w, g, options, options["decoupled_weight_decay"])
    m, v = update_moments(w, g, state, options)
    move = m / w.scalar(1 - beta1**step) * w.scalar(options["lr"])
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    if length > 5:
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        move = move * (w.scalar((1 - beta2**step) ** 0.5) / (v.sqrt() + w.scalar(options["eps"])))
        move = move * w.scalar(rectified**0.5)
    return w - move, {"exp_avg": m, "exp_avg_sq": v}


def adamax(w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of Adam with the infinity norm (Kingma and Ba 2015, section 7)."""
    (beta1, beta2), zero = options["betas"], w.zero()
    g = add_weight_decay(w, g, options)
    m = state.get("exp_avg", zero)
    m = m + w.scalar(1 - beta1) * (g - m)
    norm = (state.get("exp_inf", zero) * w.scalar(beta2)).maximum(abs(g) + w.scalar(options["eps"]))
    rate = w.scalar(options["lr"] / (1 - beta1 ** (steps + 1)))
    return w - rate * m / norm, {"exp_avg": m, "exp_inf": norm}


def adagrad(w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of Adagrad (Duchi, Hazan and Singer 2011)."""
    g = add_weight_decay(w, g, options)
    total = state.get("sum", w.zero() + w.scalar(options["initial_accumulator_value"])) + g * g
    rate = w.scalar(options["lr"] / (1 + steps * options["lr_decay"]))
    return w - rate * g / (total.sqrt() + w.scalar(options["eps"])), {"sum": total}


def adadelta(w: BoundedTensor, g: BoundedTensor, state: State, _steps: float, options: Options) -> Update:
    """Take a step of Adadelta (Zeiler 2012)."""
    rho, eps, zero = options["rho"], w.scalar(options["eps"]), w.zero()
    g = add_weight_decay(w, g, options)
    square = update_mean_square(w, g, state.get("square_avg", zero), rho)
    moved = state.get("acc_delta", zero)
    delta = (moved + eps).sqrt() / (square + eps).sqrt() * g
    after = {"square_avg": square, "acc_delta": update_mean_square(w, delta, moved, rho)}
    return w - w.scalar(options["lr"]) * delta, after


def rmsprop(w: BoundedTensor, g: BoundedTensor, state: State, _steps: float, options: Options) -> Update:
    """Take a step of RMSprop (Hinton 2012), optionally centered (Graves 2013) and with momentum."""
    alpha, zero = options["alpha"], w.zero()
    g = add_weight_decay(w, g, options)
    square = update_mean_square(w, g, state.get("square_avg", zero), alpha)
    after, spread = {"square_avg": square}, square
    if options["centered"]:
        mean = state.get("grad_avg", zero)
        mean = after["grad_avg"] = mean + w.scalar(1 - alpha) * (g - mean)
        spread = square - mean * mean
    move = g / (spread.sqrt() + w.scalar(options["eps"]))
    if options["momentum"]:
        move = state.get("momentum_buffer", zero) * w.scalar(options["momentum"]) + move
        after["momentum_buffer"] = move
    return w - w.scalar(options["lr"]) * move, after


def asgd(w: BoundedTensor, g: BoundedTensor, state: State, steps: float, options: Options) -> Update:
    """Take a step of averaged SGD (Polyak and Juditsky 1992).

    ``state["eta"]`` is the learning rate of this step, which the previous step computed.
    """
    lr, lambd, step, one = options["lr"], options["lambd"], steps + 1, w.scalar_one()
    g = add_weight_decay(w, g, options)
    rate, mu = state.get("eta", w.scalar(lr)), state.get("mu", one)
    w = w * (one - w.scalar(lambd) * rate) - rate * g
    # Also where mu is 1. There torch's multi-tensor code, a GPU's default, adds the difference; the single-tensor code
    # copies the weight.
    average = state.get("ax", w.zero())
    average = average + (w - average) * mu
    # torch's multi-tensor code computes ``next_rate`` in float32: two products, a sum, a power (2), a quotient and a
    # product.
    next_rate = w.scalar(lr / (1 + lambd * lr * step) ** options["alpha"], roundings=7)
    return w, {"ax": average, "eta": next_rate, "mu": w.scalar(1 / max(1, step - options["t0"]))}


def rprop(w: BoundedTensor, g: BoundedTensor, state: State, _steps: float, options: Options) -> Update:
    """Take a step of resilient propagation (Riedmiller and Braun 1993), which uses only the signs of gradients."""
    (less, more), (least, most) = options["etas"], options["step_sizes"]
    turn = g.sign().times_sign(state.get("prev", w.zero()).sign())
    value = torch.where(turn.value > 0, more, torch.where(turn.value < 0, less, 1.0))
    factor = BoundedTensor(value, torch.where(turn.error > 0, more - less, w.scalar(more).error), w.dtype)
    size = (state.get("step_size", w.zero() + w.scalar(options["lr"])) * factor).clamp(least, most)
    # Where the sign of the gradient changed, the weight does not move and no gradient is stored.
    kept = BoundedTensor(g.value.where(turn.value >= 0, 0.0), g.error + g.value.abs() * turn.error, w.dtype)
    return w - kept.sign() * size, {"prev": kept, "step_size": size}


def sgd(w: BoundedTensor, g: BoundedTensor, state: State, _steps: float, options: Options) -> Update:
    """Take a step of SGD with weight decay, momentum, dampening and Nesterov momentum (Sutskever et al. 2013)."""
    g = add_weight_decay(w, g, options)
    after: dict[str, BoundedTensor] = {}
    if options["momentum"]:
        buffer = g
        if "momentum_buffer" in state:
            fresh = g if not options["dampening"] else w.scalar(1 - options["dampening"]) * g
            buffer = w.scalar(options["momentum"]) * state["momentum_buffer"] + fresh
        after["momentum_buffer"] = buffer
        g = g + w.scalar(options["momentum"]) * buffer if options["nesterov"] else buffer
    return w - w.scalar(options["lr"]) * g, after


Formula = Callable[[BoundedTensor, BoundedTensor, State, float, Options], Update]
FORMULAS: dict[str, Formula] = {
    "adadelta": adadelta,
    "adagrad": adagrad,
    "adam": partial(adam, False),
    "adamax": adamax,
    "adamw": partial(adam, True),
    "asgd": asgd,
    "nadam": nadam,
    "radam": radam,
    "rmsprop": rmsprop,
    "rprop": rprop,
    "sgd": sgd,
}
