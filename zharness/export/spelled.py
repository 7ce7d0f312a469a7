"""Values as Python text, for constants of a script: what their classes and functions are called is collected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch

from zharness.errors import UsageError
from zharness.export.collect import OURS, Collection


def spelled(value: Any, collection: Collection, imports: list[str]) -> str:
    """An expression for ``value``; definitions of this package go into ``collection``, of others into ``imports``.

    Raises UsageError for what no script can say.
    """

    def of(inner: Any) -> str:
        return spelled(inner, collection, imports)

    if isinstance(value, Enum):
        return f"{named(type(value), collection, imports)}.{value.name}"
    if value is None or isinstance(value, (bool, int, str, torch.dtype)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, (type, FunctionType)):
        return named(value, collection, imports)
    if is_dataclass(value):
        given = [f"{one.name}={of(getattr(value, one.name))}" for one in fields(value) if not usual(value, one)]
        return f"{named(type(value), collection, imports)}({', '.join(given)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{of(key)}: {of(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (frozenset, set)):
        return f"{type(value).__name__}([{', '.join(sorted(map(of, value)))}])"
    if isinstance(value, tuple):
        return f"({', '.join(map(of, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(of, value))}]"
    raise UsageError(f"cannot export: a script has no words for {value!r}, a {type(value).__name__}")


def usual(value: Any, one: Field[Any]) -> bool:
    """Whether a field has the value that it has where nobody gives one."""
    if one.default_factory is not MISSING:
        return bool(getattr(value, one.name) == one.default_factory())
    return one.default is not MISSING and bool(getattr(value, one.name) == one.default)


def named(thing: Any, collection: Collection, imports: list[str]) -> str:
    """A class or a function at the top of a module, by its name. Raises UsageError for one that stands elsewhere."""
    module, name = thing.__module__, thing.__qualname__
    if not name.isidentifier():
        raise UsageError(f"cannot export: a script cannot name {name} of {module}, which stands inside of another")
    if module.partition(".")[0] == OURS:
        return collection.add(module, name)
    imports.append(f"from {module} import {name}")
    return str(name)
