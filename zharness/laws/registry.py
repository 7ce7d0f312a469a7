"""Collect all laws by name, and find laws by name or pattern."""

from __future__ import annotations

from zharness.cell import refuse_partial_ids
from zharness.law_kit.law import Law
from zharness.laws import (
    access,
    backward,
    backward_outputs,
    checkpointing,
    circumstances,
    double_backward,
    loop,
    mesh,
    mesh_any_order,
    mesh_buffers,
    mesh_dropout,
    mesh_evaluation,
    mesh_expert_not_finite,
    mesh_frozen,
    mesh_loss_scale,
    mesh_not_finite,
    mesh_routing,
    mesh_state,
    mesh_token_loss,
    mesh_wire,
    model,
    parameters,
    parameters_any_order,
    parameters_edited,
    parameters_initial,
    pipeline,
    pipeline_any_order,
    pipeline_buffers,
    pipeline_dropout,
    pipeline_frozen,
    pipeline_one_hot,
    pipeline_replicas,
    pipeline_resume,
    pipeline_state,
    pipeline_steps,
    pipeline_token_loss,
    pipeline_unequal,
    pipeline_wire,
    precision,
    resources,
    state,
    torch_func,
    training,
)
from zharness.names import matches_pattern, require_law, require_laws

# The order in which laws are listed and run.
LAW_MODULES = (
    training,
    parameters_any_order,
    parameters_edited,
    backward,
    backward_outputs,
    double_backward,
    torch_func,
    checkpointing,
    precision,
    parameters,
    parameters_initial,
    access,
    circumstances,
    state,
    resources,
    mesh,
    mesh_any_order,
    mesh_buffers,
    mesh_dropout,
    mesh_evaluation,
    mesh_frozen,
    mesh_not_finite,
    mesh_expert_not_finite,
    mesh_loss_scale,
    mesh_routing,
    mesh_state,
    mesh_token_loss,
    mesh_wire,
    pipeline,
    pipeline_any_order,
    pipeline_buffers,
    pipeline_dropout,
    pipeline_frozen,
    pipeline_one_hot,
    pipeline_replicas,
    pipeline_resume,
    pipeline_state,
    pipeline_steps,
    pipeline_token_loss,
    pipeline_unequal,
    pipeline_wire,
    loop,
    model,
)
LAWS: dict[str, Law] = {law.name: law for module in LAW_MODULES for law in module.LAWS}


def get_law(name: str) -> Law:
    """Return the law with this name. Raise UsageError if there is no such law."""
    require_law(name, LAWS)
    return LAWS[name]


def find_laws(patterns: tuple[str, ...]) -> list[Law]:
    """Return the laws that match any of the glob ``patterns``, or all laws if ``patterns`` is empty.

    Raise UsageError if a pattern matches no law, or has a bracket.
    """
    refuse_partial_ids(patterns)
    require_laws(patterns, LAWS)
    return [law for name, law in LAWS.items() if not patterns or any(matches_pattern(name, p) for p in patterns)]
