"""Compute the learning rates of DeepSpeed's schedulers (deepspeed/runtime/lr_schedules.py, 0.19.8)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import lr_scheduler

from zharness.errors import ConfigError

SCHEDULED_STEPS = 100  # steps for which a schedule is computed; the last rate holds for later steps
LEAST_WARMUP_STEPS = 2  # DeepSpeed raises smaller numbers to 2, because log(1) is zero
NOT_COMPUTED = ("OneCycle",)  # DeepSpeed's scheduler that also changes momentum
LAST_ITERATION = "last_batch_iteration"
POSITIVE_INTEGERS = ("warmup_num_steps", "lr_range_test_step_size")
NOT_NUMBERS = ("warmup_type", "lr_range_test_staircase")
Params = Mapping[str, Any]


def schedule_factors(name: str, section: Params, learning_rate: float) -> tuple[float, ...] | None:
    """Return the factors of the learning rate in each step, or None for a scheduler that is not computed here.

    A factor is the scheduler's rate divided by ``learning_rate``, the optimizer's rate. Raises ConfigError, with the
    ``name`` of the configuration, for a parameter that is unknown, missing, or refused by the scheduler.
    """
    kind, params = str(section.get("type")), dict(section.get("params", {}))
    if kind not in SCHEDULES:
        require_known_scheduler(name, section.get("type"))
        return None
    if learning_rate == 0:
        return None
    compute, known, required = SCHEDULES[kind]
    for key in params:
        if key not in known:
            raise ConfigError(f"config {name!r}: " + str(ConfigError.unknown_name("scheduler parameter", key, known)))
    missing = [key for key in required if key not in params]
    if missing:
        raise ConfigError(f"config {name!r}: scheduler.params of {kind} has no {', '.join(missing)}; add it")
    require_valid_values(name, params)
    if any(isinstance(params[key], (list, tuple)) for key in params):
        return None  # a list has a rate for each parameter group, and the file declares no groups
    # DeepSpeed's schedulers begin at step -1, because the scheduler's step() follows the optimizer's step(). If a
    # scheduler begins later, the first step has the optimizer's own rate.
    start = params.get(LAST_ITERATION, -1)
    rates = [compute(start + step, params, learning_rate) for step in range(SCHEDULED_STEPS)]
    if start != -1:
        rates[0] = learning_rate
    return tuple(rate / learning_rate for rate in rates)


def require_known_scheduler(name: str, kind: Any) -> None:
    """Raise ConfigError for a scheduler that neither DeepSpeed nor torch has; null means no scheduler."""
    of_torch = {key for key, value in vars(lr_scheduler).items() if isinstance(value, type) and key.endswith("LR")}
    known = [*SCHEDULES, *NOT_COMPUTED, *sorted(of_torch | {"ReduceLROnPlateau"})]
    if kind is not None and not hasattr(lr_scheduler, str(kind)) and kind not in known:
        remedy = "DeepSpeed takes its own schedulers and those of torch.optim.lr_scheduler"
        raise ConfigError(f"config {name!r}: " + str(ConfigError.unknown_name("scheduler.type", kind, known, remedy)))


def require_valid_values(name: str, params: Params) -> None:
    """Raise ConfigError for a value that DeepSpeed's schedulers refuse or cannot compute with."""
    for key, value in params.items():
        if key in POSITIVE_INTEGERS:
            valid, expected = isinstance(value, int) and value > 0, "a positive integer, as DeepSpeed does"
        elif key == LAST_ITERATION:
            valid, expected = isinstance(value, int) and value >= -1, "an integer from -1 on"
        elif key in NOT_NUMBERS or (key == "warmup_max_lr" and value is None):
            continue
        elif key == "total_num_steps":
            valid, expected = isinstance(value, (int, float)), "a number"
        else:
            valid = isinstance(value, (int, float)) or (
                isinstance(value, (list, tuple)) and all(isinstance(rate, (int, float)) for rate in value)
            )
            expected = "a number"
        if not valid:
            raise ConfigError(
                f"config {name!r}: scheduler.params.{key} is {json.dumps(value, default=str)}; expected {expected}"
            )


def count_warmup_steps(params: Params) -> int:
    """Return the number of steps of the warm-up."""
    return max(LEAST_WARMUP_STEPS, int(params.get("warmup_num_steps", 1000)))


def warmup_share(step: int, params: Params) -> float | None:
    """Return the share of the warm-up that is done in ``step``, or None after the warm-up."""
    steps = count_warmup_steps(params)
    if step >= steps:
        return None
    return step / steps if params.get("warmup_type") == "linear" else math.log(step + 1) / math.log(steps)


def warmup_rate(step: int, params: Params, learning_rate: float) -> float:
    """Return the rate of WarmupLR."""
    return warmed_rate(step, {"warmup_max_lr": None, **params}, learning_rate, 1.0)


def warmup_decay_rate(step: int, params: Params, learning_rate: float) -> float:
    """Return the rate of WarmupDecayLR, which falls to zero after the warm-up."""
    total, warmup = params["total_num_steps"], count_warmup_steps(params)
    share = max(0.0, (total - step) / max(1.0, total - warmup))
    return warmed_rate(step, {"warmup_max_lr": 0.001, **params}, learning_rate, share)


def warmed_rate(step: int, params: Params, learning_rate: float, share_afterwards: float) -> float:
    """Return the rate between the least and the largest rate; after the warm-up, its share is ``share_afterwards``.

    If the largest rate is None, the optimizer's rate takes its place.
    """
    least, largest = params.get("warmup_min_lr", 0.0), params["warmup_max_lr"]
    largest = learning_rate if largest is None else largest
    if step < 0:
        return float(least)
    share = warmup_share(step, params)
    return float(least + (largest - least) * (share_afterwards if share is None else share))


def warmup_cosine_rate(step: int, params: Params, learning_rate: float) -> float:
    """Return the rate of WarmupCosineLR, which falls along a cosine after the warm-up."""
    if step < 0:
        return 0.0
    share, first = warmup_share(step, params), params.get("warmup_min_ratio", 0.0)
    if share is not None:
        return float(learning_rate * (first + (1.0 - first) * share))
    warmup = count_warmup_steps(params)
    progress = min(1.0, (step - warmup + 1) / max(1, params["total_num_steps"] - warmup))
    last = params.get("cos_min_ratio", 0.0001)
    return float(learning_rate * max(0.0, last + (1.0 - last) * (1 + math.cos(math.pi * progress)) / 2))


def range_test_rate(step: int, params: Params, _learning_rate: float) -> float:
    """Return the rate of LRRangeTest, which grows in steps or continuously."""
    least = params.get("lr_range_test_min_lr", 1e-3)
    if step < 0:
        return float(least)
    intervals = (step + 1) / params.get("lr_range_test_step_size", 2000)
    intervals = math.floor(intervals) if params.get("lr_range_test_staircase") else intervals
    return float(least * (1 + params.get("lr_range_test_step_rate", 1.0) * intervals))


WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", LAST_ITERATION)
COSINE = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", LAST_ITERATION)
RANGE_TEST = (*(f"lr_range_test_{key}" for key in ("min_lr", "step_size", "step_rate", "staircase")), LAST_ITERATION)
# For each scheduler: the function that computes its rate, its parameters, and its parameters without a default.
SCHEDULES: Mapping[str, tuple[Callable[[int, Params, float], float], tuple[str, ...], tuple[str, ...]]] = {
    "WarmupLR": (warmup_rate, WARMUP, ()),
    "WarmupDecayLR": (warmup_decay_rate, ("total_num_steps", *WARMUP), ("total_num_steps",)),
    "WarmupCosineLR": (warmup_cosine_rate, COSINE, ("total_num_steps",)),
    "LRRangeTest": (range_test_rate, RANGE_TEST, ()),
}
