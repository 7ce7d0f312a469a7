"""The checks by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from zharness.checks import (
    any_order,
    backward,
    checkpointing,
    double_backward,
    foreign_state,
    own_model,
    parameters,
    precision,
    resources,
    state,
    torch_func,
    training,
    variations,
)
from zharness.checks.law import Check
from zharness.errors import UsageError

GROUPS = (
    *(training, variations, any_order, backward, double_backward, torch_func, checkpointing, precision, parameters),
    *(state, foreign_state, resources, own_model),
)
CHECKS: dict[str, Check] = {check.name: check for group in GROUPS for check in group.CHECKS}


def check_named(name: str) -> Check:
    """The check of that name. Raises UsageError when there is none."""
    if name not in CHECKS:
        raise UsageError.unknown("check", name, CHECKS, "`zharness list checks` prints every law")
    return CHECKS[name]


def find_checks(patterns: tuple[str, ...]) -> list[Check]:
    """The checks that match any of the glob ``patterns`` (all without one). Raises UsageError for an idle pattern."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name in CHECKS):
            raise UsageError.unknown("check", pattern, CHECKS, "a pattern may use * and may name a group")
    return [check for name, check in CHECKS.items() if not patterns or any(matches(name, p) for p in patterns)]


@cache
def matches(name: str, pattern: str) -> bool:
    """Whether a check's name matches a glob, or lies in the group of that name."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
