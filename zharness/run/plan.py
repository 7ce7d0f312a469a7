"""Plan the cells of a request, each with the reason if the engine does not support it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zharness import engines
from zharness.cell import TF32, Cell, dtype_of_storage, is_cell_id
from zharness.device import is_gpu_requested
from zharness.device.float32_products import find_tf32_problem
from zharness.engines import Capabilities
from zharness.engines.options import find_exclusion
from zharness.errors import UnknownStage, UsageError
from zharness.law_kit.dtypes import KNOWN_DTYPES
from zharness.law_kit.given_programs import ProgramCell, split_variant
from zharness.law_kit.law import ModelScope
from zharness.law_set import list_later_changes
from zharness.laws import Law, find_laws, get_law
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.names import STAGES, require_dtypes, require_stages
from zharness.run.cell_planner import CellPlanner, PlannedCell, plan_cell
from zharness.run.claimed_pairs import describe_uncoverable_pairs
from zharness.run.configuration import cell_setting, is_config_file, load_configuration
from zharness.run.covering import Covering, cover_pairs
from zharness.run.covering_axes import Axes, Depth
from zharness.run.law_variants import leave_out, list_covered_laws, select_models
from zharness.run.mesh_claims import (
    UnclaimedAxes,
    applies_to_model,
    needs_mesh,
    require_any_plan,
    require_mesh,
    require_mesh_at_some_stage,
    require_mesh_for_laws,
    require_plan,
)
from zharness.workload.user_model import is_user_model
from zharness.world.limits import check_world_size

ARRAY_WORLD_SIZES = (2, 1, 3, 4)  # the world sizes of covering arrays; the first is the default

ClaimsLookup = Callable[[str, int], Capabilities]


@dataclass(frozen=True)
class Request:
    """The cells to run: glob patterns of laws or whole cell ids, and the values of each axis of the matrix.

    Empty ``patterns``, ``stages`` or ``models`` select all laws, stages or models. ``engines``, ``world_sizes`` and
    ``dtypes`` select only the values that they name, so that an empty one gives no cells. With a ``depth`` above 1
    (``Depth``), cells are added that cover pairs of laws, engine options, accumulation windows, calls of backward,
    world sizes and dtypes (``zharness.run.covering``); ``array_world_sizes`` and ``array_dtypes`` are the world sizes
    and dtypes of the added cells, by default those of the other cells. ``mesh`` has the axes of parallelism beside data
    parallelism, and applies to all cells. ``law_set`` is the version of the law set whose law variants run; it does not
    limit cells that are named by their ids. ``unclaimed_axes`` says whether an engine that does not claim an axis of
    the mesh is refused.
    """

    patterns: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("reference",)
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("fp32",)
    models: tuple[str, ...] = ()
    engine_variant: str = ""
    depth: int = 1
    array_world_sizes: tuple[int, ...] = ()
    array_dtypes: tuple[str, ...] = ()
    mesh: Mesh = DEFAULT_MESH
    law_set: str = ""
    unclaimed_axes: UnclaimedAxes = UnclaimedAxes.REFUSED


def choose_patterns(laws: tuple[str, ...], checks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns of the parameter ``laws`` or of its older name ``checks``.

    Raises UsageError if both are given.
    """
    if laws and checks:
        raise UsageError(f"got laws={laws!r} and checks={checks!r}; expected laws, or its older name checks, not both")
    return laws or checks


@dataclass(frozen=True)
class Plan:
    """The cells of a request, each once and in the order of the matrix, and the covered pairs by engine.

    ``left_out`` maps each law variant that the pinned law set leaves out to the reason.
    """

    cells: tuple[PlannedCell, ...]
    coverings: Mapping[str, Covering]
    left_out: Mapping[str, str] = field(default_factory=dict)


def plan(request: Request, claims: ClaimsLookup) -> list[PlannedCell]:
    """Return the cells of ``request`` in the order of the matrix, each once.

    ``claims(engine, stage)`` returns an engine's capabilities. Raises UsageError if ``request`` names an engine, stage,
    dtype, model, world size or law that does not exist.
    """
    return list(plan_with_coverage(request, claims).cells)


def plan_with_coverage(request: Request, claims: ClaimsLookup) -> Plan:
    """Return the cells of ``request``, with the pairs of settings that they cover at depth 2 and above.

    Raises UsageError as ``plan`` does.
    """
    validate_request(request)
    ids = [pattern for pattern in request.patterns if is_cell_id(pattern)]
    globs = tuple(pattern for pattern in request.patterns if not is_cell_id(pattern))
    cells = [plan_named_cell(Cell.parse(text), claims, request.unclaimed_axes) for text in ids]
    coverings = dict[str, Covering]()
    left_out = list_later_changes(request.law_set) if request.law_set else {}
    if globs or not ids:
        laws = list(leave_out(find_laws(globs), left_out))
        is_whole = len(find_laws(globs)) == len(find_laws(()))
        for engine in request.engines:
            matrix = list(plan_engine_cells(engine, request, laws, claims))
            cells.extend(matrix)
            if request.mesh.sizes:
                require_any_plan(dict.fromkeys(planned.cell.model for planned in matrix), request.mesh)
            if request.depth > 1:
                coverings[engine] = plan_covering_cells(engine, request, laws, claims, matrix, is_whole)
                cells.extend(PlannedCell(cell) for cell in coverings[engine].cells)
    if not cells and left_out and not list(leave_out(find_laws(globs), left_out)):
        raise UsageError(
            f"there is nothing to run: the law set {request.law_set} has none of the laws {', '.join(globs)}; "
            f"`zharness laws diff {request.law_set}` lists what it leaves out"
        )
    if not cells and not request.mesh.sizes and not any(map(is_user_model, request.models)):
        (engine, *_), stages = request.engines, request.stages or STAGES
        require_mesh_for_laws(engine, globs, request.models, first_buildable_claims(engine, stages, claims))
    if not cells:
        raise UsageError(
            f"there is nothing to run: none of the laws ({', '.join(request.patterns) or 'all'}) applies to "
            f"{'the models ' + ', '.join(request.models) if request.models else 'these options'}; "
            "`zharness list laws` and `zharness list models` list the possible names"
        )
    return Plan(tuple({cell.cell: cell for cell in cells}.values()), coverings, left_out)


def shuffle_cells(cells: Sequence[PlannedCell], seed: int) -> list[PlannedCell]:
    """Shuffle ``cells`` by ``seed``.

    Pooled ranks run cells one after the other, so another order may reveal state that a cell leaves behind.
    """
    return random.Random(seed).sample(cells, len(cells))  # noqa: S311 - not a secret


def validate_request(request: Request) -> None:
    """Raise UsageError for an engine, stage, dtype, model, world size or law that does not exist."""
    if request.engine_variant and request.depth > 1:
        raise UsageError(
            f"got the variant {request.engine_variant!r} and depth {request.depth}; a covering array chooses the "
            "options of its cells itself: leave out the variant, or use depth 1"
        )
    if request.mesh.sizes and request.depth > 1:
        raise UsageError(
            f"got the mesh {request.mesh.label} and depth {request.depth}; a covering array chooses world sizes, and "
            "its cells have no mesh: use depth 1 on a mesh, where --variant A+B sets options of the engine"
        )
    for engine in request.engines:
        engines.require(engine)
    require_stages(request.stages)
    require_dtypes(request.dtypes, KNOWN_DTYPES)
    if TF32 in request.dtypes and (problem := find_tf32_problem(is_gpu_requested())):
        raise UsageError(problem)
    for model in request.models:
        require_plan(model, request.mesh)
    for world_size in request.world_sizes:
        request.mesh.shape(world_size)  # raises UsageError if the mesh does not fit
        check_world_size(world_size)
    find_laws(tuple(pattern for pattern in request.patterns if not is_cell_id(pattern)))
    for pattern in filter(is_cell_id, request.patterns):
        get_law(Cell.parse(pattern).law)


def plan_named_cell(
    cell: Cell, claims: ClaimsLookup, unclaimed_axes: UnclaimedAxes = UnclaimedAxes.REFUSED
) -> PlannedCell:
    """Plan a cell that the request names by its id. Raises UsageError if the matrix has no such cell."""
    law = get_law(cell.law)
    law.required_features(cell.variant)  # raises UsageError for an unknown variant
    axes = ((cell.engine,), (cell.stage,), (cell.world_size,), (cell.dtype,), (cell.model,))
    validate_request(Request((), *axes, mesh=cell.mesh))
    if is_user_model(cell.model):
        require_any_model_law(law, cell)
    elif not applies_to_model(law, cell.model, cell.mesh):
        raise UsageError.unknown_name(f"model for {law.name}:", cell.model, law.models)
    elif law.get_variant(cell.variant).model_scope is ModelScope.USERS:
        raise UsageError.unknown_name(f"variant of {law.name} on {cell.model}:", cell.variant, law.workload_variants)
    stages = select_stages(cell.engine, (cell.stage,), claims)
    require_variant(cell.engine, cell.engine_variant, stages, claims)
    capabilities = claims(cell.engine, stages[0])
    require_mesh(cell.engine, cell.mesh, (cell.world_size,), capabilities, unclaimed_axes)
    planned = plan_cell(law, cell, capabilities)
    if law.programs is not None and not planned.unsupported_reason:
        law.programs.require_legal(cell.variant, make_program_cell(cell, capabilities))
    return planned


def make_program_cell(cell: Cell, capabilities: Capabilities, salt: int = 0) -> ProgramCell:
    """Return the values that determine the program of a cell; ``salt`` is mixed into the seed of the cell."""
    claims = capabilities.with_options(cell_setting(cell.engine_variant).options).on_mesh(cell.mesh)
    return ProgramCell(cell.model, split_variant(cell.variant)[0], cell.seed(salt), cell.storage_dtype, claims)


def plan_engine_cells(engine: str, request: Request, laws: list[Law], claims: ClaimsLookup) -> Iterator[PlannedCell]:
    """Yield every cell of one engine. Raises UsageError for a stage or variant that the engine does not have."""
    engine_stages = select_stages(engine, request.stages, claims)
    require_variant(engine, request.engine_variant, engine_stages, claims)
    claims_at_stages = (claims(engine, stage) for stage in engine_stages)
    require_mesh_at_some_stage(engine, request.mesh, request.world_sizes, claims_at_stages, request.unclaimed_axes)
    for stage in request.stages or engine_stages:
        planner = CellPlanner(claims(engine, stage)) if stage in engine_stages else None
        for law in laws:
            for cell in expand_law_cells(law, engine, stage, request):
                if planner is None:
                    yield PlannedCell(cell, f"{engine} has no stage {stage}")
                else:
                    yield planner.plan_cell(law, cell)


def plan_covering_cells(
    engine: str,
    request: Request,
    laws: Sequence[Law],
    claims: ClaimsLookup,
    matrix: Sequence[PlannedCell],
    is_whole: bool,
) -> Covering:
    """Choose the cells that cover pairs of values on one engine, in addition to the cells of its ``matrix``.

    ``is_whole`` is true if ``laws`` are all laws; then pairs of two values are also covered.
    """
    stages = select_stages(engine, request.stages, claims)
    claims_at = {stage: claims(engine, stage) for stage in stages}
    planners = {stage: CellPlanner(capabilities) for stage, capabilities in claims_at.items()}
    claimed_dtypes = frozenset().union(*(capabilities.dtypes for capabilities in claims_at.values()))
    axes = Axes(
        engine,
        claims_at,
        request.array_world_sizes or request.world_sizes,
        tuple(dtype for dtype in request.array_dtypes or request.dtypes if dtype_of_storage(dtype) in claimed_dtypes),
        lambda law, cell: planners[cell.stage].plan_cell(law, cell).unsupported_reason,
        min(capabilities.joined_options for capabilities in claims_at.values()),
    )
    runnable = [planned.cell for planned in matrix if not planned.unsupported_reason]
    depth = Depth(request.depth)
    without_mesh = [law for law in laws if not needs_mesh(law)]  # the cells of an array have no mesh
    covered = [each for law in without_mesh for each in list_covered_laws(law, request.models, depth)]
    covering = cover_pairs(axes, covered, runnable, depth, is_whole)
    return replace(covering, uncoverable=tuple(describe_uncoverable_pairs(axes, covered, covering.coverable, is_whole)))


def select_stages(engine: str, requested_stages: tuple[int, ...], claims: ClaimsLookup) -> tuple[int, ...]:
    """Return the requested stages that the engine has, or all of its stages if none was requested.

    Raises UsageError if the engine has none of the requested stages.
    """
    engine_stages = first_buildable_claims(engine, requested_stages or STAGES, claims).stages
    selected = tuple(stage for stage in (requested_stages or STAGES) if stage in engine_stages)
    if not selected:
        raise UsageError.unknown_name(
            f"stage of engine {engine!r}:", ", ".join(map(str, requested_stages)), sorted(engine_stages)
        )
    return selected


def require_variant(engine: str, variant: str, stages: tuple[int, ...], claims: ClaimsLookup) -> None:
    """Raise UsageError for a variant that ``engine`` has at none of ``stages``, or for a file that cannot be read."""
    if is_config_file(variant):
        load_configuration(variant)
        return
    known = {name: option for stage in stages for name, option in claims(engine, stage).engine_options.items()}
    options = cell_setting(variant).options
    for name in options:
        if name not in known:
            names = list(known) or ["(the engine has none)"]
            raise UsageError.unknown_name(f"variant of engine {engine!r}:", name, names)
    reason = find_exclusion({name: known[name] for name in options})
    if reason:
        raise UsageError(f"got the setting {variant!r} of engine {engine!r}, in which {reason}; leave one of them out")


def first_buildable_claims(engine: str, stages: tuple[int, ...], claims: ClaimsLookup) -> Capabilities:
    """Return the claims at the first of ``stages`` at which the engine can be built.

    Raises the first UsageError that is not about an unknown stage if the engine cannot be built at any of them.
    """
    errors = []
    for stage in stages:
        try:
            return claims(engine, stage)
        except UsageError as error:
            errors.append(error)
    raise next((error for error in errors if not isinstance(error, UnknownStage)), errors[0])


def list_dtypes(law: Law, variant: str, request: Request) -> Iterator[str]:
    """Yield the dtypes of the cells of one variant of a law.

    A check of every law on a mesh has depth 1 and one dtype. The function adds the ``mesh_dtypes`` of the law and the
    variant, unless the user named dtypes; in that case ``array_dtypes`` also has only the named dtypes.
    """
    yield from request.dtypes
    if request.mesh.sizes and not request.patterns:
        on_mesh = dict.fromkeys((*law.mesh_dtypes, *law.get_variant(variant).mesh_dtypes))
        yield from (dtype for dtype in on_mesh if dtype in {*request.array_dtypes} - {*request.dtypes})


def expand_law_cells(law: Law, engine: str, stage: int, request: Request) -> Iterator[Cell]:
    """Yield the cells of one law at one stage. A law that needs a mesh has no cell on data parallelism alone."""
    if needs_mesh(law) and not request.mesh.sizes:
        return
    for world_size in request.world_sizes:
        for model, variant in select_models(law, request.models, request.mesh):
            for dtype in list_dtypes(law, variant, request):
                yield Cell(
                    law.name, engine, stage, world_size, dtype, model, variant, request.engine_variant, request.mesh
                )


def require_any_model_law(law: Law, cell: Cell) -> None:
    """Raise UsageError unless ``law``, in the law variant of ``cell``, applies to users' models."""
    if law.get_variant(cell.variant).model_scope is ModelScope.WORKLOAD:
        applicable = [
            f"{applicable_law.name}{variant and f' ({variant})'}"
            for applicable_law in find_laws(())
            for variant in applicable_law.user_model_variants
        ]
        raise UsageError.unknown_name("law for a user's model", f"{law.name} {cell.variant}".strip(), applicable)
