"""Write the section ``scheduler`` with which DeepSpeed builds the schedule of an OptimizerSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zharness.engines.protocol import OptimizerSpec
from zharness.errors import ConfigError

# The name and the parameters of a scheduler, for the rates of the parameter groups.
Scheduler = Callable[[Sequence[float]], tuple[str, Mapping[str, Any]]]

WARM_UP = {"warmup_num_steps": 2, "warmup_type": "linear"}


def warm_up(_rates: Sequence[float]) -> tuple[str, Mapping[str, Any]]:
    """Return WarmupLR, which rises to the rate of each group."""
    return "WarmupLR", {**WARM_UP, "warmup_min_lr": 0.0}


def shortest_warm_up(_rates: Sequence[float]) -> tuple[str, Mapping[str, Any]]:
    """Return WarmupLR with a logarithmic warm-up of one step, which DeepSpeed extends to two steps."""
    return "WarmupLR", {"warmup_num_steps": 1, "warmup_type": "log", "warmup_min_lr": 0.0}


def warm_up_decay(rates: Sequence[float]) -> tuple[str, Mapping[str, Any]]:
    """Return WarmupDecayLR, which falls to zero two steps after the warm-up."""
    return "WarmupDecayLR", {**WARM_UP, "total_num_steps": 4, "warmup_min_lr": 0.0, "warmup_max_lr": list(rates)}


def warm_up_cosine(_rates: Sequence[float]) -> tuple[str, Mapping[str, Any]]:
    """Return WarmupCosineLR, which falls to zero two steps after the warm-up."""
    return "WarmupCosineLR", {**WARM_UP, "total_num_steps": 4, "cos_min_ratio": 0.0}


def range_test(rates: Sequence[float], *, staircase: bool) -> tuple[str, Mapping[str, Any]]:
    """Return LRRangeTest, which increases the rate of each group by its initial value in every two steps."""
    keys = {"min_lr": list(rates), "step_size": 2, "step_rate": 1.0, "staircase": staircase}
    return "LRRangeTest", {f"lr_range_test_{key}": value for key, value in keys.items()}


def one_cycle(rates: Sequence[float], **params: Any) -> tuple[str, Mapping[str, Any]]:
    """Return OneCycle, which rises in two steps from the rate of each group to four times it, and falls in two."""
    least, largest = list(rates), [4 * rate for rate in rates]
    bounds: dict[str, Any] = {"cycle_min_lr": least, "cycle_max_lr": largest}
    if len(rates) == 1:  # all releases take a number, only the newest take a list
        bounds = {"cycle_min_lr": least[0], "cycle_max_lr": largest[0]}
    sizes = {"cycle_first_step_size": 2, "cycle_second_step_size": 2}
    return "OneCycle", {**bounds, **sizes, "cycle_momentum": False, **params}


# By the factors of the schedule. The first two factors of a warm-up are the factors of the steps -1 and 0.
SCHEDULERS: Mapping[tuple[float, ...], Scheduler] = {
    (0.0, 0.0, 0.5, 1.0): warm_up,
    (0.0, 0.0, 1.0, 1.0): shortest_warm_up,
    (0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0): warm_up_decay,
    (0.0, 0.0, 0.5, 0.5, 0.0, 0.0): warm_up_cosine,
    (1.0, 1.5, 2.0, 2.5): lambda rates: range_test(rates, staircase=False),
    (1.0, 1.0, 2.0, 2.0, 3.0): lambda rates: range_test(rates, staircase=True),
    (1.0, 2.5, 4.0, 2.5, 1.0, 0.5): lambda rates: one_cycle(rates, decay_step_size=1, decay_lr_rate=1.0),
    (1.0, 1.0, 4.0, 1.0, 1.0): lambda rates: one_cycle(rates, cycle_first_stair_count=1),
}


def json_scheduler(spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the section ``scheduler`` that gives the schedule of ``spec``.

    ``groups`` are the optimizer's parameter groups, whose rates DeepSpeed's schedulers need. Raises ConfigError for a
    schedule that none of DeepSpeed's schedulers has.
    """
    if spec.schedule not in SCHEDULERS:
        raise ConfigError(
            f"got json_scheduler with the schedule {spec.schedule}, which none of DeepSpeed's schedulers has"
        )
    name, params = SCHEDULERS[spec.schedule]([group.get("lr", spec.args["lr"]) for group in groups])
    return {"scheduler": {"type": name, "params": dict(params)}}
