"""DeepSpeed's JSON as a table: a key is honoured, or cannot change a number, or is fixed at one value, or refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zharness.errors import ConfigError

ValueParser = Callable[[str, Any], Any]
_DTYPES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half"),
}


@dataclass(frozen=True)
class Key:
    """A key that is honoured: ``read(path, value)`` checks and converts; ``default`` is the raw value of an absent one.

    ``null`` in the JSON means absent, as in DeepSpeed.
    """

    parse: ValueParser
    default: Any = None


@dataclass(frozen=True)
class FixedKey:
    """A key of which one value is what this engine does anyway; any other is refused for ``reason``."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Section:
    """One object of the JSON. ``harmless`` keys cannot change a number; a key in none of the three is refused by name.

    ``disabled`` names whole sections that are accepted only where they are empty or ``{"enabled": false}``.
    """

    supported_keys: Mapping[str, Key]
    ignored_keys: frozenset[str] = frozenset()
    fixed_keys: Mapping[str, FixedKey] = field(default_factory=dict)
    disabled_sections: frozenset[str] = frozenset()

    def __call__(self, path: str, values: Any) -> dict[str, Any]:
        """Every honoured key with its value or default. Raises ConfigError for what cannot be honoured."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path or 'the configuration'} is {values!r}; expected an object of keys and values")
        prefix = f"{path}." if path else ""
        for key, value in values.items():
            self._check_key(prefix + key, key, value)
        chosen = {
            key: rule.default if values.get(key) is None else values[key] for key, rule in self.supported_keys.items()
        }
        return {key: v if v is None else self.supported_keys[key].parse(prefix + key, v) for key, v in chosen.items()}

    def _check_key(self, path: str, key: str, value: Any) -> None:
        if key in self.supported_keys or key in self.ignored_keys:
            return
        if key in self.fixed_keys:
            if value is not None and value != self.fixed_keys[key].value:
                raise ConfigError(
                    f"{path} is {value!r}; only {self.fixed_keys[key].value!r}: {self.fixed_keys[key].reason}"
                )
            return
        if key in self.disabled_sections:
            if value and not (isinstance(value, Mapping) and value.get("enabled") is False):
                raise ConfigError(f"the reference engine does not honour {path!r}; remove or disable the section")
            return
        known = (*self.supported_keys, *self.fixed_keys, *sorted(self.ignored_keys | self.disabled_sections))
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"honoured: {', '.join(sorted(self.supported_keys))}"
        raise ConfigError(f"the reference engine does not honour {path!r}; {hint}")

    def iter_ignored_keys(self, path: str = "") -> Iterator[str]:
        """Every key, here and below, that is accepted because it cannot change a number."""
        yield from (path + key for key in sorted(self.ignored_keys))
        for key, rule in self.supported_keys.items():
            if isinstance(rule.parse, Section):
                yield from rule.parse.iter_ignored_keys(f"{path}{key}.")


def integer_parser(minimum: int) -> ValueParser:
    """A whole number from ``least`` on."""

    def parse(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{path} is {value!r}; expected a whole number from {minimum} on")
        return value

    return parse


def parse_number(path: str, value: Any) -> float:
    """A finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{path} is {value!r}; expected a finite number from 0 on")
    return float(value)


def parse_flag(path: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{path} is {value!r}; expected true or false")
    return value


def choice_parser(*allowed: Any) -> ValueParser:
    """One of a closed list."""

    def parse(path: str, value: Any) -> Any:
        if value not in allowed or isinstance(value, bool):
            raise ConfigError.unknown_name(path, value, allowed)
        return value

    return parse


def parse_dtype(path: str, value: Any) -> torch.dtype:
    """One of DeepSpeed's names for float32, bfloat16 or float16."""
    for found, names in _DTYPES.items():
        if str(value).removeprefix("torch.").lower() in names:
            return found
    raise ConfigError.unknown_name(path, value, [names[0] for names in _DTYPES.values()])


def parse_names(path: str, value: Any) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{path} is {value!r}; expected a list of names")
    return tuple(value)


def parse_arguments(path: str, value: Any) -> dict[str, Any]:
    """Keyword arguments for a class of torch, which checks them itself."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; expected an object of arguments")
    return dict(value)
