"""Engines broken on purpose, one way each: what a law that cannot fail would let through.

Each is a few lines around the reference engine, DDP or FSDP2, names the real bug that it imitates if there is one, and
the cells that have to kill it. The files are named for what is broken; everything that reaches behind an engine's
protocol goes through ``seams``. Every command takes a mutant for an engine, by name::

    zharness check training.grads --engine zharness.mutants:never_reduces
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from zharness.engines import EngineFactory
from zharness.errors import UsageError
from zharness.mutants import (  # noqa: F401 - each registers its mutants
    accumulation,
    autocast,
    backwards,
    buffers,
    checkpoint,
    clipping,
    double_backward,
    full_tensors,
    gradient_norm,
    hooks,
    learning_rate,
    loss_scale,
    master_weights,
    memory,
    no_sync,
    optimizer,
    optimizer_checkpoint,
    parameters,
    prefetch,
    random_state,
    reduce_dtype,
    reduction,
    sharding,
    side_effects,
    stale_graphs,
    transforms,
    unused_parameters,
)
from zharness.mutants.mutant import PATH, REGISTERED, FaultKind, Mutant, Origin, Target

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in REGISTERED})

__all__ = ["MUTANTS", "PATH", "FaultKind", "Mutant", "Origin", "Target", "find_mutants"]


def find_mutants(patterns: tuple[str, ...]) -> list[Mutant]:
    """Return the mutants that match any of the glob ``patterns``; all of them if there are no patterns.

    Raises UsageError for a pattern that matches no mutant.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in MUTANTS):
            raise UsageError.unknown_name(
                "mutant", pattern, MUTANTS, "`zharness list mutants` says what each does wrong"
            )
    return [each for name, each in MUTANTS.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def __getattr__(name: str) -> EngineFactory:
    """Return a mutant's factory, so that ``zharness.mutants:name`` is an engine as any other."""
    if name not in MUTANTS:
        raise AttributeError(f"zharness.mutants has no mutant {name!r}")
    return MUTANTS[name].build
