"""Whether what was read from JSON has the form that a class of annotated fields says: what shows it relies on that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from zharness.parity.mismatch_report import HeatMap, JsonNumber, MismatchReport


@cache
def field_types(annotated_class: Any) -> dict[str, Any]:
    """The annotations of a class, read once."""
    return get_type_hints(annotated_class)


def require_field_types(instance: Any) -> None:
    """Raises TypeError unless every field of a dataclass has the form of its annotation."""
    kind: Any = type(instance)
    for name, form in field_types(kind).items():
        require_type(getattr(instance, name), form, name)


def require_type(value: Any, expected_type: Any, label: str) -> None:
    """Raises TypeError unless ``value`` has ``form``: a class, X | Y, list[X], tuple[X, ...], Mapping or TypedDict."""
    if not matches_type(value, expected_type):
        wanted = expected_type.__name__ if isinstance(expected_type, type) else str(expected_type)
        raise TypeError(f"{label} is {value!r:.60}, expected {wanted}")


def matches_type(value: Any, expected_type: Any) -> bool:
    """Whether ``value`` has ``form``, at any depth."""
    kind, parts = get_origin(expected_type) or expected_type, get_args(expected_type)
    if (types := leaf_types(expected_type)) is not None:
        return type(value) in types
    if kind in (Union, UnionType):
        return any(matches_type(value, part) for part in parts)
    if is_typeddict(kind):
        fields = field_types(kind)
        alike = isinstance(value, dict) and value.keys() == fields.keys()
        return alike and all(matches_type(value[name], fields[name]) for name in fields)
    if kind is Mapping:
        return isinstance(value, dict) and all(matches_type(each, parts[1]) for each in value.values())
    if not isinstance(value, kind):
        return False
    # A heat map has a thousand numbers: their types are looked at together.
    types = leaf_types(parts[0])
    return all(matches_type(each, parts[0]) for each in value) if types is None else types.issuperset(map(type, value))


@cache
def leaf_types(expected_type: Any) -> frozenset[type] | None:
    """The types of a form without parts; None where it has some. JSON's integers are floats too, its booleans not."""
    if get_origin(expected_type) in (Union, UnionType):
        found = [leaf_types(part) for part in get_args(expected_type)]
        return None if None in found else frozenset().union(*(types for types in found if types is not None))
    if get_origin(expected_type) is not None or is_typeddict(expected_type):
        return None
    return frozenset({int, float}) if expected_type is float else frozenset({expected_type})


def require_valid_exhibit(exhibit: MismatchReport) -> None:
    """Raises TypeError or ValueError for evidence of another form, or whose parts do not fit each other."""
    require_type(exhibit, MismatchReport, "evidence")
    if min(exhibit["shape"], default=1) < 1:
        raise ValueError(f"evidence of shape {exhibit['shape']}, expected positive sizes")
    require_numeric(layer["ratio"] for layer in exhibit["layers"] or [])
    for curve in exhibit["curves"].values():
        require_numeric([*curve["engine"], *curve["baseline"]])
    if exhibit["heat"] is not None:
        require_valid_heat_map(exhibit["heat"])


def require_valid_heat_map(heat: HeatMap) -> None:
    """Raises ValueError unless the blocks are as many as ``rows`` x ``columns`` say, at least one."""
    sizes, widths = [heat["rows"], heat["columns"], *heat["block"]], {len(row) for row in heat["values"]}
    if len(sizes) != 4 or min(sizes) < 1 or len(heat["values"]) != heat["rows"] or widths != {heat["columns"]}:
        raise ValueError(f"a heat map of {heat['rows']} x {heat['columns']} blocks of {heat['block']} has other values")
    for row in heat["values"]:
        require_numeric(row)


def require_numeric(values: Iterable[JsonNumber]) -> None:
    """Raises ValueError for a string that stands for no number."""
    for value in values:
        float(value)
