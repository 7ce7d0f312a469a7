"""The checks by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from zharness.errors import UsageError
from zharness.law_kit.law import Law
from zharness.laws import (
    any_order,
    backward,
    checkpointing,
    double_backward,
    model,
    parameters,
    precision,
    resources,
    state,
    state_foreign_checkpoints,
    torch_func,
    training,
    training_variations,
)

LAW_MODULES = (
    *(
        training,
        training_variations,
        any_order,
        backward,
        double_backward,
        torch_func,
        checkpointing,
        precision,
        parameters,
    ),
    *(state, state_foreign_checkpoints, resources, model),
)
LAWS: dict[str, Law] = {law.name: law for module in LAW_MODULES for law in module.LAWS}


def get_law(name: str) -> Law:
    """The check of that name. Raises UsageError when there is none."""
    if name not in LAWS:
        raise UsageError.unknown_name("check", name, LAWS, "`zharness list checks` prints every law")
    return LAWS[name]


def find_laws(patterns: tuple[str, ...]) -> list[Law]:
    """The checks that match any of the glob ``patterns`` (all without one). Raises UsageError for an idle pattern."""
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in LAWS):
            raise UsageError.unknown_name("check", pattern, LAWS, "a pattern may use * and may name a group")
    return [check for name, check in LAWS.items() if not patterns or any(matches_pattern(name, p) for p in patterns)]


@cache
def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a check's name matches a glob, or lies in the group of that name."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
