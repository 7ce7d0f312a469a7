"""Find a model by the name that it has in a cell: a model of the registry, or the path of a user's factory."""

from __future__ import annotations

from zharness.mesh import CONTEXT, EXPERT, TENSOR, Mesh
from zharness.names import require_model
from zharness.workload.models import MODELS, ModelSpec
from zharness.workload.user_model import is_user_model, user_model_spec


def model_spec(name: str) -> ModelSpec:
    """Return the ModelSpec of the registered model ``name``, or of the user's factory ``package.module:factory``.

    A factory is imported now, and called when its model is built. Raises UsageError if no model has the name ``name``.
    """
    if is_user_model(name):
        return user_model_spec(name)
    require_model(name, MODELS)
    return MODELS[name]


def explain_uneven_parts(spec: ModelSpec, mesh: Mesh, axis: str) -> str:
    """Return the reason why ``axis`` of ``mesh`` cannot split all parts of the model evenly, or '' if it can."""
    counts = {
        TENSOR: [(count, parts) for parts, count in spec.tp_parts.items()],
        CONTEXT: [(count, parts) for parts, count in spec.cp_parts.items()],
        EXPERT: [(count, "experts") for count in spec.ep_plan.values()],
    }
    size = mesh.size(axis)
    uneven = (f"{count} {parts}" for count, parts in counts[axis] if count % size)
    return next((f"the {parts} of the model {spec.name} cannot be split over {axis}{size}" for parts in uneven), "")
