"""Engines broken on purpose, one way each: what a check that cannot fail would let through.

Each is a few lines around the reference engine, DDP or FSDP2, says which real bug it imitates where there is one, and
names the cells that have to kill it. Every command takes one for an engine, by name::

    zharness check training.grads --engine zharness.mutants:never_reduces
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from zharness.engines import EngineFactory
from zharness.errors import UsageError
from zharness.mutants import (
    blind,
    blind2,
    blind3,
    blind4,
    blind5,
    blind6,
    circumstances,
    contributions,
    graphs,
    onlookers,
    optimizers,
    orders,
    precision,
    resources,
    scale,
    shards,
    state,
)
from zharness.mutants.mutant import PATH, Kind, Mutant, Target

FILES = (
    *(scale, contributions, shards, optimizers, precision, graphs, state, resources, circumstances, onlookers, orders),
    *(blind, blind2, blind3, blind4, blind5, blind6),
)
MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for file in FILES for mutant in file.MUTANTS})

__all__ = ["MUTANTS", "PATH", "Kind", "Mutant", "Target", "find_mutants"]


def find_mutants(patterns: tuple[str, ...]) -> list[Mutant]:
    """The mutants that match any of the glob ``patterns`` (all without one). Raises UsageError for an idle pattern."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in MUTANTS):
            raise UsageError.unknown_name(
                "mutant", pattern, MUTANTS, "`zharness list mutants` says what each does wrong"
            )
    return [each for name, each in MUTANTS.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def __getattr__(name: str) -> EngineFactory:
    """A mutant's factory, so that ``zharness.mutants:name`` is an engine as any other."""
    if name not in MUTANTS:
        raise AttributeError(f"zharness.mutants has no mutant {name!r}")
    return MUTANTS[name].build
