"""Find expected failures that match no cell of a run, although the run has every cell that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import product

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.laws import DTYPES
from zharness.laws.registry import find_laws
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.names import STAGES
from zharness.run.cell_planner import PlannedCell
from zharness.run.claims import get_engine_version
from zharness.run.expected_failures import ONE, SEVERAL, ExpectedFailure
from zharness.run.law_variants import select_models
from zharness.run.matching_failures import list_matchable_entries
from zharness.run.mesh_claims import explain_unclaimed_mesh
from zharness.run.plan import ClaimsLookup, Request, first_buildable_claims, plan, plan_engine_cells
from zharness.run.shipped_failures import expected_failures_for, list_failures_around
from zharness.workload.user_model import IN_PROCESS_PACKAGE, is_user_model, resolve_factory


def describe_unmatched_failures(
    cells: Sequence[PlannedCell], claims: ClaimsLookup, user_failures: Sequence[ExpectedFailure] = ()
) -> list[str]:
    """Describe each expected failure of a run's engines that matches none of ``cells``, and name the entry to delete.

    An entry is described only if the run has every cell that the entry covers. An entry that matches a passing cell is
    not described, because the record of that cell says that the entry is stale. An entry that is only for users' models
    is also described if one of these models cannot be imported. In a run without a user's model, this applies only to
    an entry of ``user_failures`` whose path names no module or factory, because the packages that the model imports
    need not be installed for such a run.
    """
    run_cells = {cell.cell for cell in cells}
    has_user_model = any(is_user_model(cell.model) for cell in run_cells)
    descriptions = []
    for engine in dict.fromkeys(cell.cell.engine for cell in cells):
        version, name = get_engine_version(engine), split_release(engine)[0]
        # A user's entry may be for a release that another spelling of the engine names.
        matched = {
            id(entry)
            for cell in cells
            if not cell.unsupported_reason and split_release(cell.cell.engine)[0] == name
            for entry in list_matchable_entries(cell.cell, version, user_failures)
        }
        for entry in expected_failures_for(engine, user_failures):
            if not entry.applies_to_version(version) or id(entry) in matched:
                continue
            is_in_run = has_user_model or not is_for_user_models(entry)
            what = f"the expected failure of {', '.join(entry.laws)} ({entry.upstream})"
            error = find_import_error(entry, has_user_model) if is_in_run or entry in user_failures else ""
            if is_in_run and not error and entry in user_failures:
                require_plannable(entry, engine, claims)
            if error:
                descriptions.append(f"{entry.location}: {what} names a model that cannot be imported: {error}")
            elif is_in_run and is_fully_run(
                iter_covered_cells(entry, engine, version, claims), run_cells, is_own=is_own_entry(entry, engine)
            ):
                descriptions.append(
                    f"{entry.location}: no cell of {entry.engine} {version} matches {what}, or an earlier entry "
                    "matches them all; delete this entry, or narrow its releases"
                )
    return descriptions


def is_for_user_models(entry: ExpectedFailure) -> bool:
    """Return whether ``entry`` names models, all of which are users' models."""
    return bool(entry.models) and all(map(is_user_model, entry.models))


def is_for_models_of_this_process(entry: ExpectedFailure) -> bool:
    """Return whether ``entry`` names a model that only the process that registered it can build."""
    return any(model.startswith(f"{IN_PROCESS_PACKAGE}:") for model in entry.models)


def find_import_error(entry: ExpectedFailure, has_user_model: bool) -> str:
    """Return the first error of importing the users' models that an entry names, or '' if all can be imported.

    Models that only the process that registered them can build are not imported. Unless the run ``has_user_model``, a
    module that exists but raises during its import counts as importable.
    """
    if not is_for_user_models(entry) or is_for_models_of_this_process(entry):
        return ""
    for model in entry.models:
        try:
            resolve_factory(model)
        except UsageError as error:
            if has_user_model or names_nothing(model, error.__cause__):
                return str(error)
    return ""


def names_nothing(model: str, cause: BaseException | None) -> bool:
    """Return whether the import of ``model`` failed because its module, or the factory in it, does not exist.

    ``cause`` is the exception that the import of the module raised, or None if the module has no such factory.
    """
    module = model.partition(":")[0]
    return cause is None or (isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."))


def is_own_entry(entry: ExpectedFailure, engine: str) -> bool:
    """Return whether an entry was written for ``engine`` as it is installed.

    An entry of a release, or of the engine around which ``engine`` is built, may be for laws that ``engine`` lacks.
    """
    return split_release(engine)[1] is None and entry not in list_failures_around(engine)


def is_fully_run(covered: Iterable[PlannedCell], run_cells: Set[Cell], *, is_own: bool) -> bool:
    """Return whether all supported cells of ``covered`` were run.

    If no cell is supported, return whether the entry ``is_own``, that is, written for exactly this engine, and any
    covered cell was run or there is none.
    """
    planned: list[PlannedCell] = []
    for cell in covered:
        if not cell.unsupported_reason and cell.cell not in run_cells:
            return False  # most entries end here, so that few of their cells are planned
        planned.append(cell)
    if any(not cell.unsupported_reason for cell in planned):
        return True
    return is_own and (not planned or any(cell.cell in run_cells for cell in planned))


def require_plannable(entry: ExpectedFailure, engine: str, claims: ClaimsLookup) -> None:
    """Raise UsageError if a user's entry names a dtype, world size, option or mesh that its laws cannot have."""
    for request in iter_requests(entry, engine, claims):
        plan(request, claims)


def iter_covered_cells(
    expected_failure: ExpectedFailure, engine: str, version: str, claims: ClaimsLookup
) -> Iterator[PlannedCell]:
    """Yield all cells that an expected failure covers, whether or not a run has them."""
    laws = find_laws(expected_failure.laws)
    for request in iter_requests(expected_failure, engine, claims):
        for cell in plan_engine_cells(engine, request, laws, claims):
            if expected_failure.covers_cell(cell.cell, version):
                yield cell


def iter_requests(expected_failure: ExpectedFailure, engine: str, claims: ClaimsLookup) -> Iterator[Request]:
    """Yield a request for each setting and mesh of an expected failure; its cells include all that the entry covers.

    An entry without world sizes counts as an entry for 2 ranks, or for as many ranks as its mesh needs for one or two
    data coordinates, as ``data_coordinates`` says. An axis without a size counts as an axis of size 2. A mesh has cells
    only of world sizes that it fits and that the engine claims with its axes; an older release may not claim them.
    """
    capabilities = first_buildable_claims(engine, STAGES, claims)
    engine_stages = capabilities.stages
    stages = tuple(stage for stage in expected_failure.stages or sorted(engine_stages) if stage in engine_stages)
    if not stages:
        return
    user_models = expected_failure.models if is_for_user_models(expected_failure) else ()
    if user_models and not any(list(select_models(law, user_models)) for law in find_laws(expected_failure.laws)):
        return
    settings = product(expected_failure.engine_variants or ("",), expected_failure.meshes or (DEFAULT_MESH.label,))
    data_size = {ONE: 1, SEVERAL: 2}.get(expected_failure.data_coordinates)
    for engine_variant, label in settings:
        mesh = Mesh.parse_smallest(label)
        world_sizes = [
            size
            for size in expected_failure.world_sizes
            or (mesh.world_size(data_size) if data_size else max(2, mesh.smallest_world),)
            if not mesh.explain_misfit(size) and not explain_unclaimed_mesh(engine, mesh, size, capabilities)
        ]
        if not world_sizes:
            continue
        yield Request(
            patterns=expected_failure.laws,
            engines=(engine,),
            stages=stages,
            world_sizes=tuple(world_sizes),
            dtypes=expected_failure.dtypes or tuple(DTYPES),
            models=user_models,
            engine_variant=engine_variant,
            mesh=mesh,
        )
