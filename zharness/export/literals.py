"""Render Python values as source text for the constants of a script."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch

from zharness.errors import UsageError
from zharness.export.collect import PACKAGE, DefinitionCollection


def render_literal(value: Any, collection: DefinitionCollection, imports: list[str]) -> str:
    """Return the source text of an expression for ``value``.

    The definitions of this package that the expression needs are added to ``collection``, and imports of other packages
    are added to ``imports``. Raises UsageError if no expression can represent the value.
    """

    def render_inner(inner: Any) -> str:
        return render_literal(inner, collection, imports)

    if isinstance(value, Enum):
        return f"{render_name(type(value), collection, imports)}.{value.name}"
    if value is None or isinstance(value, (bool, int, str, torch.dtype)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
        function, arguments = find_maker(value), inspect.getclosurevars(value).nonlocals
        return render_call(render_name(function, collection, imports), (), arguments, render_inner)
    if isinstance(value, (type, FunctionType)):
        return render_name(value, collection, imports)
    if isinstance(value, partial):
        imports.append("from functools import partial")
        return render_call("partial", (value.func, *value.args), value.keywords, render_inner)
    if is_dataclass(value):
        given = [
            f"{field.name}={render_inner(getattr(value, field.name))}"
            for field in fields(value)
            if not is_default(value, field)
        ]
        return f"{render_name(type(value), collection, imports)}({', '.join(given)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{render_inner(key)}: {render_inner(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (frozenset, set)):
        return f"{type(value).__name__}([{', '.join(sorted(map(render_inner, value)))}])"
    if isinstance(value, tuple):
        return f"({', '.join(map(render_inner, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(render_inner, value))}]"
    raise UsageError(f"cannot export the cell: a script cannot contain {value!r}, which is a {type(value).__name__}")


def render_call(name: str, args: Sequence[Any], keywords: Mapping[str, Any], render: Callable[[Any], str]) -> str:
    """Return the source text of a call of the function ``name``; ``render`` returns the text of an argument."""
    return f"{name}({', '.join([*map(render, args), *(f'{key}={render(value)}' for key, value in keywords.items())])})"


def find_maker(function: FunctionType) -> Callable[..., Any]:
    """Return the module-level function that returns such a function when it is called with the closure of ``function``.

    Raises UsageError if the parameters of the outer function differ from the variables in the closure of ``function``,
    since the values of the other parameters are not known.
    """
    outer_name = function.__qualname__.partition(".")[0]
    outer = getattr(sys.modules[function.__module__], outer_name, None)
    if outer is None or set(inspect.signature(outer).parameters) != set(function.__code__.co_freevars):
        raise UsageError(
            f"cannot export the cell: a script cannot build {function.__qualname__} of {function.__module__}, which is "
            f"defined inside a function and does not use exactly the parameters of {outer_name}"
        )
    return outer  # type: ignore[no-any-return]  # an attribute of a module


def is_default(value: Any, field: Field[Any]) -> bool:
    """Return whether the field ``field`` of the dataclass instance ``value`` has its default value."""
    if field.default_factory is not MISSING:
        return bool(getattr(value, field.name) == field.default_factory())
    return field.default is not MISSING and bool(getattr(value, field.name) == field.default)


def render_name(thing: Any, collection: DefinitionCollection, imports: list[str]) -> str:
    """Return the name of a module-level class or function, and add its definition or import to the script.

    Raises UsageError for a class or function that is defined inside another one.
    """
    module, name = thing.__module__, thing.__qualname__
    if not name.isidentifier():
        raise UsageError(
            f"cannot export the cell: a script cannot import {name} of {module}, which is defined inside a function "
            "or a class"
        )
    if module.partition(".")[0] == PACKAGE:
        return collection.add(module, name)
    imports.append(f"from {module} import {name}")
    return str(name)
