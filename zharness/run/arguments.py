"""Check the argument types of the public functions, so that a mistake raises UsageError with one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zharness.errors import UsageError

EXAMPLES: Mapping[type, str] = {str: "('first', 'second')", int: "(2, 3)"}
KINDS: Mapping[type, str] = {str: "names", int: "integers"}


def require_tuples(kind: type, **arguments: Any) -> None:
    """Raise UsageError unless each argument is an iterable of ``kind`` (str or int) and not a string."""
    for name, value in arguments.items():
        is_iterable = isinstance(value, Iterable) and not isinstance(value, str)
        if is_iterable and all(type(each) is kind for each in value):
            continue
        alone = f"({value!r},)" if type(value) is kind else EXAMPLES[kind]
        raise UsageError(f"got {name}={value!r}; expected a tuple of {KINDS[kind]}, such as {name}={alone}")


def require_names(**arguments: Any) -> None:
    """Raise UsageError unless each argument is a string."""
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise UsageError(f"got {name}={value!r}; expected a string")


def require_integers(**arguments: Any) -> None:
    """Raise UsageError unless each argument is an integer."""
    for name, value in arguments.items():
        if type(value) is not int:
            raise UsageError(f"got {name}={value!r}; expected an integer")


def require_at_least(minimum: int, **arguments: Any) -> None:
    """Raise UsageError unless each argument is a number that is not below ``minimum``."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= minimum:
            raise UsageError(f"got {name}={value!r}; expected a number that is at least {minimum}")
