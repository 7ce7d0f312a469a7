"""Check DeepSpeed's JSON against a schema: each key is supported, ignored, allowed with one value, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zharness.errors import ConfigError, find_close_names

ValueParser = Callable[[str, Any], Any]
_DTYPES = {
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half"),
}


@dataclass(frozen=True)
class Key:
    """A supported key of the JSON.

    ``parse(path, value)`` checks and converts the key's value. ``default`` is passed to ``parse`` if the key is absent
    or ``null``, which DeepSpeed treats alike.
    """

    parse: ValueParser
    default: Any = None


@dataclass(frozen=True)
class FixedKey:
    """A key with only one allowed value, which describes what this engine does.

    Any other value is refused with ``reason``.
    """

    value: Any
    reason: str


@dataclass(frozen=True)
class Section:
    """The keys that are allowed in one object of the JSON; any other key is refused.

    Keys in ``ignored_keys`` are accepted because they cannot change a result. Sections in ``disabled_sections`` are
    accepted only if they are empty or ``{"enabled": false}``.
    """

    supported_keys: Mapping[str, Key]
    ignored_keys: frozenset[str] = frozenset()
    fixed_keys: Mapping[str, FixedKey] = field(default_factory=dict)
    disabled_sections: frozenset[str] = frozenset()

    def __call__(self, path: str, values: Any) -> dict[str, Any]:
        """Return the parsed value, or the parsed default, of every supported key.

        Raises ConfigError for a key or a value that is not supported.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path or 'the configuration'} is {values!r}; expected a JSON object (a dict)")
        prefix = f"{path}." if path else ""
        for key, value in values.items():
            self._check_key(prefix + key, key, value)
        chosen = {
            key: rule.default if values.get(key) is None else values[key] for key, rule in self.supported_keys.items()
        }
        return {key: v if v is None else self.supported_keys[key].parse(prefix + key, v) for key, v in chosen.items()}

    def _check_key(self, path: str, key: str, value: Any) -> None:
        """Raise ConfigError if ``key`` is not supported, or if it is fixed or disabled and ``value`` is not allowed."""
        if key in self.supported_keys or key in self.ignored_keys:
            return
        if key in self.fixed_keys:
            if value is not None and value != self.fixed_keys[key].value:
                raise ConfigError(
                    f"{path} is {value!r}, but the reference engine supports only {self.fixed_keys[key].value!r}: "
                    f"{self.fixed_keys[key].reason}"
                )
            return
        if key in self.disabled_sections:
            if value and not (isinstance(value, Mapping) and value.get("enabled") is False):
                raise ConfigError(f"the reference engine does not support {path!r}; remove or disable the section")
            return
        known = (*self.supported_keys, *self.fixed_keys, *sorted(self.ignored_keys | self.disabled_sections))
        near = find_close_names(key, known)
        supported = ", ".join(sorted(self.supported_keys))
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"supported: {supported}"
        raise ConfigError(f"the reference engine does not support {path!r}; {hint}")

    def iter_ignored_keys(self, path: str = "") -> Iterator[str]:
        """Yield the paths of the ignored keys of this section and of the sections inside it."""
        yield from (path + key for key in sorted(self.ignored_keys))
        for key, rule in self.supported_keys.items():
            if isinstance(rule.parse, Section):
                yield from rule.parse.iter_ignored_keys(f"{path}{key}.")


def integer_parser(minimum: int) -> ValueParser:
    """Return a parser that accepts integers that are at least ``minimum``."""

    def parse(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{path} is {value!r}; expected an integer of at least {minimum}")
        return value

    return parse


def parse_number(path: str, value: Any) -> float:
    """Return ``value`` if it is a finite number that is not negative. Raises ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{path} is {value!r}; expected a finite number of at least 0")
    return float(value)


def parse_flag(path: str, value: Any) -> bool:
    """Return ``value`` if it is true or false. Raises ConfigError otherwise."""
    if not isinstance(value, bool):
        raise ConfigError(f"{path} is {value!r}; expected true or false")
    return value


def choice_parser(*allowed: Any) -> ValueParser:
    """Return a parser that accepts only the ``allowed`` values."""

    def parse(path: str, value: Any) -> Any:
        if value not in allowed or isinstance(value, bool):
            raise ConfigError.unknown_name(path, value, allowed)
        return value

    return parse


def parse_dtype(path: str, value: Any) -> torch.dtype:
    """Return the dtype (float32, bfloat16 or float16) that ``value`` names. Raises ConfigError for any other value."""
    for dtype, names in _DTYPES.items():
        if str(value).removeprefix("torch.").lower() in names:
            return dtype
    raise ConfigError.unknown_name(path, value, [names[0] for names in _DTYPES.values()])


def parse_names(path: str, value: Any) -> tuple[str, ...]:
    """Return ``value`` if it is a list of strings. Raises ConfigError otherwise."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{path} is {value!r}; expected a list of strings")
    return tuple(value)


def parse_arguments(path: str, value: Any) -> dict[str, Any]:
    """Return keyword arguments as a dict, which the torch class that gets them checks later.

    Raises ConfigError if ``value`` is not a JSON object.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; expected a JSON object (a dict) of keyword arguments")
    return dict(value)
