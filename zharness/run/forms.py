"""Whether what was read from JSON has the form that a class of annotated fields says: what shows it relies on that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from zharness.parity.exhibit import Exhibit, Heat, Number


@cache
def hints(form: Any) -> dict[str, Any]:
    """The annotations of a class, read once."""
    return get_type_hints(form)


def require_fields(read: Any) -> None:
    """Raises TypeError unless every field of a dataclass has the form of its annotation."""
    kind: Any = type(read)
    for name, form in hints(kind).items():
        require(getattr(read, name), form, name)


def require(value: Any, form: Any, where: str) -> None:
    """Raises TypeError unless ``value`` has ``form``: a class, X | Y, list[X], tuple[X, ...], Mapping or TypedDict."""
    if not fits(value, form):
        wanted = form.__name__ if isinstance(form, type) else str(form)
        raise TypeError(f"{where} is {value!r:.60}, expected {wanted}")


def fits(value: Any, form: Any) -> bool:
    """Whether ``value`` has ``form``, at any depth."""
    kind, parts = get_origin(form) or form, get_args(form)
    if (types := leaves(form)) is not None:
        return type(value) in types
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if is_typeddict(kind):
        fields = hints(kind)
        alike = isinstance(value, dict) and value.keys() == fields.keys()
        return alike and all(fits(value[name], fields[name]) for name in fields)
    if kind is Mapping:
        return isinstance(value, dict) and all(fits(each, parts[1]) for each in value.values())
    if not isinstance(value, kind):
        return False
    # A heat map has a thousand numbers: their types are looked at together.
    types = leaves(parts[0])
    return all(fits(each, parts[0]) for each in value) if types is None else types.issuperset(map(type, value))


@cache
def leaves(form: Any) -> frozenset[type] | None:
    """The types of a form without parts; None where it has some. JSON's integers are floats too, its booleans not."""
    if get_origin(form) in (Union, UnionType):
        found = [leaves(part) for part in get_args(form)]
        return None if None in found else frozenset().union(*(types for types in found if types is not None))
    if get_origin(form) is not None or is_typeddict(form):
        return None
    return frozenset({int, float}) if form is float else frozenset({form})


def require_drawable(exhibit: Exhibit) -> None:
    """Raises TypeError or ValueError for evidence of another form, or whose parts do not fit each other."""
    require(exhibit, Exhibit, "evidence")
    if min(exhibit["shape"], default=1) < 1:
        raise ValueError(f"evidence of shape {exhibit['shape']}, expected positive sizes")
    require_numbers(layer["ratio"] for layer in exhibit["layers"] or [])
    for curve in exhibit["curves"].values():
        require_numbers([*curve["engine"], *curve["baseline"]])
    if exhibit["heat"] is not None:
        require_grid(exhibit["heat"])


def require_grid(heat: Heat) -> None:
    """Raises ValueError unless the blocks are as many as ``rows`` x ``columns`` say, at least one."""
    sizes, widths = [heat["rows"], heat["columns"], *heat["block"]], {len(row) for row in heat["values"]}
    if len(sizes) != 4 or min(sizes) < 1 or len(heat["values"]) != heat["rows"] or widths != {heat["columns"]}:
        raise ValueError(f"a heat map of {heat['rows']} x {heat['columns']} blocks of {heat['block']} has other values")
    for row in heat["values"]:
        require_numbers(row)


def require_numbers(values: Iterable[Number]) -> None:
    """Raises ValueError for a string that stands for no number."""
    for value in values:
        float(value)
