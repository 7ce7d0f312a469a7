"""Mutants, which are engines that are broken on purpose, each in one way, so that every law can be shown to fail.

A mutant is a few lines of code around the reference engine, DDP or FSDP2. A mutant names the cells that have to kill
it, and the real bug that it imitates, if there is one. Each file is named after what its mutants break; all code that
uses the private parts of an engine is in ``seams*``. Every command accepts a mutant by name as its engine::

    zharness check training.grads --engine zharness.mutants:never_reduces
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from zharness.engines import EngineFactory
from zharness.mutants import (  # noqa: F401 - each module registers its mutants
    accumulation,
    after_change,
    autocast,
    backwards,
    buffers,
    checkpoint,
    circumstances,
    clipping,
    damaged_checkpoint,
    double_backward,
    edited_weights,
    evaluation_mode,
    float64_weights,
    full_tensors,
    grad_scalers,
    gradient_norm,
    hooks,
    hysteresis,
    initial_weights,
    kept_copies,
    late_products,
    learning_rate,
    loop,
    loss_scale,
    master_weights,
    memory,
    mesh,
    mesh_buffers,
    mesh_conditions,
    mesh_context,
    mesh_context_laws,
    mesh_context_norms,
    mesh_context_state,
    mesh_copies,
    mesh_deepspeed_copies,
    mesh_dropout,
    mesh_experts,
    mesh_experts_state,
    mesh_experts_steps,
    mesh_experts_wire,
    mesh_later_steps,
    mesh_loss_scale,
    mesh_norms,
    mesh_not_finite,
    mesh_precision,
    mesh_programs,
    mesh_resources,
    mesh_stand_ins,
    mesh_state,
    mesh_token_loss,
    mesh_unsplit,
    mesh_windows,
    mesh_wire,
    momentum,
    muon,
    no_sync,
    not_finite,
    optimizer,
    optimizer_checkpoint,
    optimizer_options,
    other_world_size,
    outputs_and_options,
    parameters,
    pipeline,
    pipeline_buffers,
    pipeline_dropout,
    pipeline_excess,
    pipeline_frozen,
    pipeline_order,
    pipeline_products,
    pipeline_replicas,
    pipeline_settings,
    pipeline_state,
    pipeline_steps,
    pipeline_tensor,
    pipeline_token_loss,
    pipeline_two_stages,
    pipeline_unequal,
    pipeline_wire,
    prefetch,
    random_state,
    rare_settings,
    reduce_dtype,
    reduction,
    reentrant,
    repeated_saves,
    rereads,
    several_engines,
    sharding,
    side_effects,
    stale_graphs,
    step_counts,
    streams,
    strided,
    tensor_access,
    tensor_ownership,
    tf32,
    transforms,
    two_dtypes,
    unused_parameters,
)
from zharness.mutants.mutant import PATH, REGISTERED, FaultKind, Mutant, Origin, Target
from zharness.names import require_mutants

MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in REGISTERED})

__all__ = ["MUTANTS", "PATH", "FaultKind", "Mutant", "Origin", "Target", "find_mutants"]


def find_mutants(patterns: tuple[str, ...]) -> list[Mutant]:
    """Return the mutants whose names match any of the glob ``patterns``, or all mutants if ``patterns`` is empty.

    Raises UsageError if a pattern matches no mutant.
    """
    require_mutants(patterns, MUTANTS)
    return [mutant for name, mutant in MUTANTS.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def __getattr__(name: str) -> EngineFactory:
    """Return the factory of the mutant ``name``, so that ``zharness.mutants:name`` is a valid engine name."""
    if name not in MUTANTS:
        raise AttributeError(f"zharness.mutants has no mutant {name!r}")
    return MUTANTS[name].build
