"""Define the options of the pytest plugin: ``--zharness-NAME``, and ``--NAME`` if nothing else has that name.

Every project of an environment loads the plugin, and some define an option such as ``--engine`` themselves.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

PREFIX = "--zharness-"


def parse_seconds(text: str) -> float:
    """Parse a time-out in seconds. Raises ArgumentTypeError unless the number is above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return value


@dataclass(frozen=True)
class PluginOption:
    """An option of the plugin: its names without prefix, the first of which is the current one.

    ``attributes`` are the keyword arguments of ``addoption``.
    """

    names: tuple[str, ...]
    group: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefixed_name(self) -> str:
        """Return the name that is always defined, as in ``--zharness-engine``."""
        return PREFIX + self.names[0]

    @property
    def dest(self) -> str:
        """Return the attribute of ``config.option``, as in ``zharness_engine``."""
        return self.prefixed_name.lstrip("-").replace("-", "_")

    def accepts(self, text: str) -> bool:
        """Return whether ``text`` is a value of this option."""
        try:
            value = self.attributes.get("type", str)(text)
        except (ValueError, argparse.ArgumentTypeError):
            return False
        return value in self.attributes.get("choices", [value])


GROUPS = {
    "zharness": "cells: laws on engines, judged against plain PyTorch; without the prefix where no other plugin or "
    "conftest.py has the name",
    "ranks": "tests on several ranks (marker world_size); without the prefix where no other plugin or conftest.py has "
    "the name",
}
OPTIONS = (
    PluginOption(
        ("engine",),
        "zharness",
        {
            "action": "append",
            "default": [],
            "help": "run the cells of this engine: NAME, NAME==RELEASE, NAME@CHECKOUT or module:factory",
        },
    ),
    PluginOption(
        ("stage",),
        "zharness",
        {"default": "", "help": "run only the cells of these ZeRO stages, for example 0,1,2,3"},
    ),
    PluginOption(
        ("variant",),
        "zharness",
        {"default": "", "help": "run the cells with this engine variant, a named set of engine options"},
    ),
    PluginOption(
        ("expected-failures", "excuses"),
        "zharness",
        {
            "action": "append",
            "default": [],
            "metavar": "FILE",
            "help": "a TOML file of failures that you expect; may be repeated",
        },
    ),
    PluginOption(
        ("cell-timeout",),
        "zharness",
        {
            "type": parse_seconds,
            "default": 120.0,
            "help": "time limit for the ranks of one cell, in seconds (default: %(default)s)",
        },
    ),
    PluginOption(
        ("shuffle",),
        "zharness",
        {"type": int, "metavar": "SEED", "help": "run the tests in a random order that SEED determines"},
    ),
    PluginOption(
        ("isolation",),
        "ranks",
        {
            "choices": ["fresh", "pooled"],
            "default": "fresh",
            "help": "fresh: fork new ranks for every test; pooled: reuse ranks for several tests (default: "
            "%(default)s)",
        },
    ),
    PluginOption(
        ("rank-timeout",),
        "ranks",
        {
            "type": parse_seconds,
            "help": "time limit for one test on several ranks, in seconds (default: that of pytest-timeout, or else "
            "60)",
        },
    ),
    PluginOption(
        ("collectives",),
        "ranks",
        {
            "choices": ["checked", "trusted"],
            "default": "checked",
            "help": "checked: before each collective, check that all ranks call the same one (up to 16 ranks); "
            "trusted: do not check (default: %(default)s)",
        },
    ),
    PluginOption(
        ("pdb-rank",),
        "ranks",
        {
            "type": int,
            "default": 0,
            "help": "the rank on which --pdb and breakpoint() open the debugger (default: %(default)s)",
        },
    ),
)


def add_prefixed_options(parser: pytest.Parser) -> None:
    """Define every option with its prefix."""
    for option in OPTIONS:
        group = parser.getgroup(option.group, GROUPS[option.group])
        group.addoption(option.prefixed_name, dest=option.dest, **option.attributes)


def find_taken_names(parser: pytest.Parser) -> set[str]:
    """Return the names of all options that are defined now."""
    return {name for group in [*parser._groups, parser._anonymous] for known in group.options for name in known.names()}


def join_short_names(arguments: Sequence[str], taken: Container[str]) -> list[str]:
    """Return the arguments with ``--NAME VALUE`` written as ``--NAME=VALUE`` for each name that is not ``taken``.

    A value that the option does not accept is not joined: it may be a path after a flag that a conftest.py defines.
    """
    options = {f"--{name}": option for option in OPTIONS for name in option.names if f"--{name}" not in taken}
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*joined, argument, *rest]
        previous = joined[-1] if joined else ""
        if previous in options and not argument.startswith("-") and options[previous].accepts(argument):
            joined[-1] = f"{previous}={argument}"
        else:
            joined.append(argument)
    return joined


def hide_values_from_paths(config: pytest.Config, parser: pytest.Parser, arguments: Sequence[str]) -> None:
    """Remove the values of the names without prefix from the paths whose conftest.py files pytest loads first.

    At that time these names are not yet defined, so that pytest takes ``reference`` in ``--engine reference`` for a
    path.
    """
    joined = join_short_names(parser.optparser._read_args_from_files(list(arguments)), find_taken_names(parser))
    known = parser.parse_known_args(joined, namespace=copy.copy(config.option))
    config.known_args_namespace.file_or_dir = known.file_or_dir


def add_free_short_names(parser: pytest.Parser) -> None:
    """Define the free names without prefix. Call this function after every conftest.py has defined its own options."""
    taken = find_taken_names(parser)
    for option in OPTIONS:
        free = [f"--{name}" for name in option.names if f"--{name}" not in taken]
        if free:
            attributes = {**option.attributes, "help": f"the same as {option.prefixed_name}"}
            parser.getgroup(option.group).addoption(*free, dest=option.dest, **attributes)


def get_option(config: pytest.Config, name: str) -> Any:
    """Return the value of the option ``name``; ``name`` has no prefix."""
    return config.getoption(PREFIX + name)
