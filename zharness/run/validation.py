"""Check that data from JSON has the types that its class annotates, because the report relies on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from zharness.parity.mismatch_report import HeatMap, JsonNumber, MismatchReport


@cache
def field_types(annotated_class: Any) -> dict[str, Any]:
    """Return the type of each field of a class. The result is cached."""
    return get_type_hints(annotated_class)


def require_field_types(instance: Any) -> None:
    """Raise TypeError unless every field of a dataclass instance has its annotated type."""
    dataclass_type: Any = type(instance)
    for name, expected_type in field_types(dataclass_type).items():
        require_type(getattr(instance, name), expected_type, name)


def require_type(value: Any, expected_type: Any, label: str) -> None:
    """Raise TypeError unless ``value`` has ``expected_type``; ``label`` names the value in the message."""
    if not matches_type(value, expected_type):
        type_name = expected_type.__name__ if isinstance(expected_type, type) else str(expected_type)
        raise TypeError(f"{label} is {value!r:.60}; expected {type_name}")


def matches_type(value: Any, expected_type: Any) -> bool:
    """Return whether ``value`` has ``expected_type``, at any depth.

    Supports classes, ``X | Y``, ``list[X]``, ``tuple[X, ...]``, Mapping and TypedDict.
    """
    kind, parts = get_origin(expected_type) or expected_type, get_args(expected_type)
    if (types := leaf_types(expected_type)) is not None:
        return type(value) in types
    if kind in (Union, UnionType):
        return any(matches_type(value, part) for part in parts)
    if is_typeddict(kind):
        fields = field_types(kind)
        has_same_keys = isinstance(value, dict) and value.keys() == fields.keys()
        return has_same_keys and all(matches_type(value[name], fields[name]) for name in fields)
    if kind is Mapping:
        return isinstance(value, dict) and all(matches_type(item, parts[1]) for item in value.values())
    if not isinstance(value, kind):
        return False
    # A heat map has a thousand numbers: comparing the set of their types is faster than checking each number.
    types = leaf_types(parts[0])
    return all(matches_type(item, parts[0]) for item in value) if types is None else types.issuperset(map(type, value))


@cache
def leaf_types(expected_type: Any) -> frozenset[type] | None:
    """Return the classes that match ``expected_type``, or None for a type with parts, such as ``list[int]``.

    An integer matches float, as in JSON; a bool does not match int.
    """
    if get_origin(expected_type) in (Union, UnionType):
        members = [leaf_types(part) for part in get_args(expected_type)]
        return None if None in members else frozenset().union(*(types for types in members if types is not None))
    if get_origin(expected_type) is not None or is_typeddict(expected_type):
        return None
    return frozenset({int, float}) if expected_type is float else frozenset({expected_type})


def require_valid_exhibit(exhibit: MismatchReport) -> None:
    """Raise TypeError or ValueError for evidence with wrong types or sizes that do not fit together."""
    require_type(exhibit, MismatchReport, "evidence")
    if min(exhibit["shape"], default=1) < 1:
        raise ValueError(f"the evidence has the shape {exhibit['shape']}; expected positive sizes")
    require_numeric(layer["ratio"] for layer in exhibit["layers"] or [])
    for curve in exhibit["curves"].values():
        require_numeric([*curve["engine"], *curve["baseline"]])
    if exhibit["heat"] is not None:
        require_valid_heat_map(exhibit["heat"])


def require_valid_heat_map(heat: HeatMap) -> None:
    """Raise ValueError unless the heat map has ``rows`` x ``columns`` numbers, which must be at least one."""
    sizes, widths = [heat["rows"], heat["columns"], *heat["block"]], {len(row) for row in heat["values"]}
    if len(sizes) != 4 or min(sizes) < 1 or len(heat["values"]) != heat["rows"] or widths != {heat["columns"]}:
        raise ValueError(
            f"a heat map of {heat['rows']} x {heat['columns']} blocks of {heat['block']} has "
            f"{len(heat['values'])} rows of {sorted(widths)} values"
        )
    for row in heat["values"]:
        require_numeric(row)


def require_numeric(values: Iterable[JsonNumber]) -> None:
    """Raise ValueError for a string that is not a number."""
    for value in values:
        float(value)
