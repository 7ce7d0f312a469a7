"""Decide whether an engine, a law and a model can have a cell on a mesh, before ranks start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.promises import CallForm
from zharness.errors import UsageError
from zharness.law_kit.law import MeshSupport
from zharness.laws import Law, find_laws
from zharness.mesh import AXES, CONTEXT, DATA_SHARD, EXPERT, PIPELINE, TENSOR, Mesh
from zharness.workload import MODELS, model_spec
from zharness.workload.model_lookup import explain_uneven_parts
from zharness.workload.user_model import is_user_model

NAMED_AXES = tuple(axis for axis in (*AXES, EXPERT) if axis != DATA_SHARD)


class UnclaimedAxes(Enum):
    """How a plan treats a mesh with axes that the engine does not claim: refuse it, or make its cells unsupported."""

    REFUSED = "refused"
    UNSUPPORTED = "unsupported"  # each cell is unsupported, with the reason: another release may claim the axes


def needs_mesh(law: Law) -> bool:
    """Return whether ``law`` has no cell on data parallelism alone."""
    return law.mesh_support in (
        MeshSupport.ONLY,
        MeshSupport.SEVERAL_COORDINATES,
        MeshSupport.ONE_COORDINATE_BESIDE_TP,
    )


def require_mesh_for_laws(
    engine: str, patterns: Sequence[str], models: Sequence[str], capabilities: Capabilities
) -> None:
    """Raise UsageError if all laws of ``patterns`` need a mesh, and name an axis on which they have cells.

    The named axis is the one that the engine claims and on which the most of these laws have cells of ``models``. If
    the engine claims no axis on which they have cells, the error names an axis of any engine, and the axes that the
    engine claims.
    """
    laws = find_laws(tuple(patterns))
    if not all(map(needs_mesh, laws)):
        return
    callable_laws = [law for law in laws if law.form is capabilities.form]
    counts = {axis: sum(has_cells_on(law, axis, models) for law in callable_laws) for axis in capabilities.mesh_axes}
    refusal = ""
    if not any(counts.values()):
        counts = {axis: sum(has_cells_on(law, axis, models) for law in laws) for axis in NAMED_AXES}
        claimed = ", ".join(sorted(capabilities.mesh_axes))
        refusal = f", and {engine} claims {f'the axes {claimed} alone' if claimed else 'no axis of a mesh'}"
    axis = min(counts, key=lambda axis: (-counts[axis], axis != TENSOR, axis))
    if counts[axis]:  # if it is 0, none of the laws has cells of these models on any axis
        raise UsageError(
            f"there is nothing to run: the laws ({', '.join(patterns)}) need a mesh, such as --mesh "
            f"{Mesh(((axis, 2),)).label}{refusal}; `zharness docs mesh` lists the axes of each engine"
        )


def has_cells_on(law: Law, axis: str, models: Sequence[str]) -> bool:
    """Return whether ``law`` has a cell of one of ``models``, or of any model if that is empty, on ``axis`` alone."""
    if law.form is CallForm.WHOLE_BATCH and axis != PIPELINE:
        return False
    mesh = Mesh(((axis, 2),))
    return any(
        applies_to_model(law, model, mesh) and not explain_missing_plan(model, mesh) for model in models or MODELS
    )


def applies_to_model(law: Law, model: str, mesh: Mesh) -> bool:
    """Return whether ``law`` names ``model`` of the workload, or the model for which ``model`` stands in on ``mesh``.

    Only attention needs a whole sequence, so only models with attention can test cp. Only a layer of experts is split
    over ep, so only models with experts can test ep. Calibrated laws run on expert models only if the law names such a
    model, because only these laws check that rounding cannot change the routing. Models that split exactly, whose gate
    routes by integers, need no such check.
    """
    spec = model_spec(model)
    if model in law.models or spec.stands_in_for not in law.models:
        return model in law.models
    if spec.splits_exactly:
        variants = () if explain_missing_plan(model, mesh) else law.workload_variants
        return any(not find_other_model(law, variant, mesh) for variant in variants)
    return (
        (TENSOR in mesh.axes and bool(spec.tp_plan) and needs_exact_stand_in(law, spec.stands_in_for))
        or (CONTEXT in mesh.axes and bool(spec.cp_plan))
        or (EXPERT in mesh.axes and bool(spec.ep_plan) and not law.is_calibrated)
    )


@cache
def find_other_model(law: Law, variant: str, mesh: Mesh) -> str:
    """Return a model that stands in on ``mesh`` for a model of the law, and can judge its ``variant``, or ''.

    Models that split exactly are skipped, because they run only the cells that no other model can run.
    """
    if law.mesh_support is MeshSupport.OWN_MODELS:
        return ""
    is_tolerant = law.is_calibrated or law.get_variant(variant).compares_engine_with_itself
    for name, spec in MODELS.items():
        if spec.splits_exactly or not (is_tolerant or (spec.exact and law.weights_stay_integers)):
            continue
        if applies_to_model(law, name, mesh) and not explain_missing_plan(name, mesh):
            return name
    return ""


def needs_exact_stand_in(law: Law, original: str) -> bool:
    """Return whether ``law`` cannot judge the model ``original`` on tp, where each rank computes partial sums.

    If ``original`` has a plan for tp, a law that is calibrated or that compares the engine with itself can judge it.
    """
    if original not in MODELS or not MODELS[original].tp_plan:
        return True
    compares = all(variant.compares_engine_with_itself for variant in law.variants)
    stays_exact = law.weights_stay_integers and "fp32" in law.dtypes
    return stays_exact and not (compares or law.is_calibrated or law.judges_split_sums)


def explain_missing_plan(model: str, mesh: Mesh, stages_per_rank: int = 1) -> str:
    """Return the reason why ``model`` cannot be split over ``mesh``, or '' if it can.

    A pipeline has ``stages_per_rank`` stages on each rank of pp, each of one module or more. Raises UsageError for an
    unknown model.
    """
    if is_user_model(model):  # the plan of a user's model is read when the model is built
        unplanned = [axis for axis in (PIPELINE, EXPERT, CONTEXT) if axis in mesh.axes]
        only = "for a model of your own, only tp has a plan: the plan that transformers ships with the model"
        return f"the model of {model} has no plan for the axis {unplanned[0]}; {only}" if unplanned else ""
    spec, stages = model_spec(model), stages_per_rank * mesh.size(PIPELINE)
    if PIPELINE in mesh.axes and len(spec.pp_plan) < stages:
        return f"the model {model} has no plan of {stages} modules or more that pp can split"
    if spec.ep_plan and EXPERT not in mesh.axes:
        return f"the model {model} has a layer of experts that ep splits; give it a mesh such as --mesh ep2"
    if EXPERT in mesh.axes and not spec.ep_plan:
        return f"the model {model} has no layer of experts that ep splits"
    if reason := explain_uneven_parts(spec, mesh, EXPERT):
        return reason
    if spec.cp_plan and CONTEXT not in mesh.axes:
        return f"the model {model} has attention whose sequence cp splits; give it a mesh such as --mesh cp2"
    if CONTEXT in mesh.axes and not spec.cp_plan:
        return f"the model {model} has no attention whose sequence cp splits"
    if reason := explain_uneven_parts(spec, mesh, CONTEXT):
        return reason
    if TENSOR not in mesh.axes:
        return ""
    if spec.tp_plan:
        return explain_uneven_parts(spec, mesh, TENSOR)
    return f"the model {model} has no plan that says how the axis tp splits its modules (ModelSpec.tp_plan)"


def is_split_exactly(model: str) -> bool:
    """Return whether the sums of ``model`` that ep and cp split are exact for all weights."""
    return not is_user_model(model) and model_spec(model).splits_exactly


def require_plan(model: str, mesh: Mesh) -> None:
    """Raise UsageError if ``model`` is unknown, or cannot be split over ``mesh``."""
    if reason := explain_missing_plan(model, mesh):
        raise UsageError(reason)


def require_any_plan(models: Collection[str], mesh: Mesh) -> None:
    """Raise UsageError if there are models and ``mesh`` splits none of them, because no cell could run.

    If another size of the same axes would split one of the models, the error gives the reason of that model.
    """
    reasons = {model: explain_missing_plan(model, mesh) for model in models}
    if not reasons or not all(reasons.values()):
        return
    axes_alone = Mesh(tuple((axis, 1) for axis, _ in mesh.sizes))
    nearest = next((model for model in reasons if not explain_missing_plan(model, axes_alone)), next(iter(reasons)))
    raise UsageError(f"the mesh {mesh.label} splits none of the models of these laws; {reasons[nearest]}")


def explain_unclaimed_plan(cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the engine cannot apply the plan of the cell's model for tp, or '' if it can."""
    if TENSOR not in cell.mesh.axes or not capabilities.plan_words:
        return ""
    for module, word in model_spec(cell.model).tp_plan.items():
        if word not in capabilities.plan_words:
            return (
                f"{cell.engine} does not claim the word {word} of the plan that splits {module} of {cell.model} on tp"
            )
    return ""


def explain_unclaimed_axes(engine: str, mesh: Mesh, capabilities: Capabilities) -> str:
    """Return the reason why ``engine`` does not claim the axes of ``mesh``, or '' if it does."""
    unclaimed = [axis for axis in mesh.axes if axis not in capabilities.mesh_axes]
    if unclaimed:
        claimed = ", ".join(sorted(capabilities.mesh_axes)) or "none"
        return f"{engine} does not claim the axis {unclaimed[0]} of the mesh; axes that it claims: {claimed}"
    reason = capabilities.explain_axes(mesh)
    return f"{engine} {reason}" if reason else ""


def explain_unclaimed_ranks(engine: str, mesh: Mesh, world_size: int, capabilities: Capabilities) -> str:
    """Return the reason why ``engine``, which claims the axes of ``mesh``, refuses ``world_size`` ranks, or ''."""
    form_laws = (law for law in find_laws(()) if law.form is capabilities.form)
    if not mesh.sizes and capabilities.mesh_axes and all(map(needs_mesh, form_laws)):
        example = f"--mesh {min(capabilities.mesh_axes)}2"
        return (
            f"got {engine} with no mesh; expected one such as {example}, which every law needs that calls "
            f"{capabilities.form.value}"
        )
    if not capabilities.whole_mesh or (mesh.sizes and mesh.data_size(world_size) == 1):
        return ""
    example = f"{(*mesh.axes, *sorted(capabilities.mesh_axes))[0]}2"
    return (
        f"got {engine} with {mesh.label or 'no mesh'} on {world_size} ranks; expected a mesh that takes all "
        f"ranks, such as --mesh {example} --world-size 2: {capabilities.whole_mesh}"
    )


def explain_unclaimed_mesh(engine: str, mesh: Mesh, world_size: int, capabilities: Capabilities) -> str:
    """Return the reason why ``engine`` does not claim ``mesh`` on ``world_size`` ranks, or '' if it does."""
    return explain_unclaimed_axes(engine, mesh, capabilities) or explain_unclaimed_ranks(
        engine, mesh, world_size, capabilities
    )


def require_mesh(
    engine: str,
    mesh: Mesh,
    world_sizes: Sequence[int],
    capabilities: Capabilities,
    unclaimed: UnclaimedAxes = UnclaimedAxes.REFUSED,
) -> None:
    """Raise UsageError if ``engine`` does not claim ``mesh``, or claims it only with other world sizes."""
    if reason := explain_unclaimed_axes(engine, mesh, capabilities):
        if unclaimed is UnclaimedAxes.UNSUPPORTED:
            return
        raise UsageError(reason)
    for world_size in world_sizes:
        if reason := explain_unclaimed_ranks(engine, mesh, world_size, capabilities):
            raise UsageError(reason)


def require_mesh_at_some_stage(
    engine: str,
    mesh: Mesh,
    world_sizes: Sequence[int],
    claims: Iterable[Capabilities],
    unclaimed: UnclaimedAxes = UnclaimedAxes.REFUSED,
) -> None:
    """Raise UsageError if ``engine`` can have ``mesh`` at no stage; ``claims`` are its claims at the stages."""
    errors = []
    for capabilities in claims:
        try:
            return require_mesh(engine, mesh, world_sizes, capabilities, unclaimed)
        except UsageError as error:
            errors.append(error)
    raise errors[0]


def explain_other_form(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the law calls engines in another form than that of the cell's engine, or ''."""
    if law.form is capabilities.form:
        return ""
    return f"{law.name} calls {law.form.value}, and {cell.engine} has {capabilities.form.value}"


def explain_unclaimed_axis(cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the engine does not have the cell's mesh at the cell's stage, or '' if it has."""
    unclaimed = next((axis for axis in cell.mesh.axes if axis not in capabilities.mesh_axes), "")
    if unclaimed:
        return f"{cell.engine} does not claim the axis {unclaimed} at stage {cell.stage}"
    reason = capabilities.explain_axes(cell.mesh)
    return f"{cell.engine} {reason}" if reason else ""


def explain_missing_schedule(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the engine cannot run the schedule of the cell's variant of the law, or '' if it can."""
    missing = [name for name in law.get_variant(cell.variant).schedules if name not in capabilities.schedules]
    if not missing:
        return ""
    claimed = ", ".join(sorted(capabilities.schedules)) or "none"
    return f"{cell.engine} does not claim the schedule {missing[0]}; schedules that it claims: {claimed}"


def count_stages_per_rank(law: Law, cell: Cell, capabilities: Capabilities) -> int:
    """Return the number of stages on each rank of pp under the schedules of the cell's variant of the law."""
    schedules = law.get_variant(cell.variant).schedules
    return max((capabilities.stages_per_rank.get(name, 1) for name in schedules), default=1)


def explain_few_micro_batches(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the batches of the cell's variant are too small for its schedules, or '' if none is."""
    variant = law.get_variant(cell.variant)
    for name in variant.schedules:
        needed = capabilities.micro_batches_per_rank.get(name, 0) * cell.mesh.size(PIPELINE)
        if variant.micro_batches < needed:
            found = f"{law.name}-{cell.variant} has batches of {variant.micro_batches}"
            return f"the schedule {name} needs {needed} micro-batches on {cell.mesh.label}, and {found}"
    return ""


def explain_missing_data_option(cell: Cell, options: Sequence[str], capabilities: Capabilities) -> str:
    """Return the reason why ranks cannot be left over for data parallelism under ``options``, or '' if they can."""
    if cell.mesh.data_size(cell.world_size) == 1:
        return ""
    for axis, needed in capabilities.data_options_on.items():
        if axis in cell.mesh.axes and needed.isdisjoint(options):
            allowed = " or ".join(sorted(needed))
            return f"{cell.engine} has data parallelism beside {axis} only with the option {allowed}"
    return ""


def explain_refused_model(cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the engine cannot be built around the cell's model, or '' if it can."""
    reason = capabilities.refuses_models.get(cell.model, "")
    return f"{cell.engine} does not claim the model {cell.model}: {reason}" if reason else ""


# By mesh support: whether a law with this support is not stated for a cell.
MESH_EXCLUSIONS: Mapping[MeshSupport, Callable[[Cell], bool]] = {
    MeshSupport.OWN_MODELS: lambda cell: (
        bool({CONTEXT, EXPERT} & set(cell.mesh.axes)) and not is_split_exactly(cell.model)
    ),
    MeshSupport.WHOLE_INPUTS: lambda cell: CONTEXT in cell.mesh.axes,
    MeshSupport.FINITE_EXPERTS: lambda cell: EXPERT in cell.mesh.axes,
    MeshSupport.SMALLER_WORLDS: lambda cell: cell.mesh.smallest_world == cell.world_size,
    MeshSupport.SEVERAL_COORDINATES: lambda cell: cell.mesh.data_size(cell.world_size) == 1,
    MeshSupport.ONE_COORDINATE_BESIDE_TP: lambda cell: (
        TENSOR in cell.mesh.axes and cell.mesh.data_size(cell.world_size) > 1
    ),
}


def reason_mesh_not_stated(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the law or the engine excludes the cell on its mesh, or '' if both support the cell."""
    if needs_mesh(law) and not cell.mesh.sizes:
        return f"{law.name} needs a mesh (--mesh): {law.mesh_support.value}"
    is_excluded = MESH_EXCLUSIONS.get(law.mesh_support)
    if is_excluded is not None and is_excluded(cell):
        on_mesh = f" and the mesh {cell.mesh.label}" if cell.mesh.sizes else ""
        return f"{law.name} is not stated for the world size {cell.world_size}{on_mesh}: {law.mesh_support.value}"
    if is_split_exactly(cell.model) and (other := find_other_model(law, cell.variant, cell.mesh)):
        return f"the model {cell.model} would show nothing of {law.name} that {other} does not show"
    if not cell.mesh.sizes:  # without a mesh, a model needs no plan
        return explain_other_form(law, cell, capabilities) or explain_refused_model(cell, capabilities)
    return (
        explain_other_form(law, cell, capabilities)
        or explain_missing_plan(cell.model, cell.mesh, count_stages_per_rank(law, cell, capabilities))
        or explain_unclaimed_axis(cell, capabilities)
        or explain_unclaimed_plan(cell, capabilities)
        or explain_missing_schedule(law, cell, capabilities)
        or explain_few_micro_batches(law, cell, capabilities)
        or explain_refused_model(cell, capabilities)
    )
