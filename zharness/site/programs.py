"""Read the program of a law: the source of the functions that it runs on every rank."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from zharness.law_kit.law import Law


def read_program(law: Law) -> str:
    """Return the source of the scenarios of ``law``, each once, or of its observer if it has none."""
    closed_over = inspect.getclosurevars(law.observe).nonlocals.values()
    functions = dict.fromkeys(function for value in closed_over for function in find_functions(value))
    return "\n\n".join(textwrap.dedent(inspect.getsource(each)).rstrip() for each in functions or (law.observe,))


def find_functions(value: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions in a variable of an observer: itself, or those of a scenario or of a mapping of scenarios."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from find_functions(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from find_functions(getattr(value, field.name))
    elif inspect.isfunction(value):
        yield value
