"""Find expected failures that match no cell of a run, although the run has every cell that they cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import product

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.laws import DTYPES
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.names import STAGES
from zharness.run.claims import get_engine_version
from zharness.run.expected_failures import ExpectedFailure, expected_failures_for, find_expected_failure
from zharness.run.plan import ClaimsLookup, PlannedCell, Request, first_buildable_claims, plan
from zharness.workload.user_model import is_user_model


def describe_unmatched_failures(
    cells: Sequence[PlannedCell], claims: ClaimsLookup, user_failures: Sequence[ExpectedFailure] = ()
) -> list[str]:
    """Describe each expected failure of a run's engines that matches none of ``cells``, and name the entry to delete.

    An entry is described only if the run has every cell that the entry covers. An entry that matches a passing cell is
    not described, because the record of that cell says that the entry is stale.
    """
    run_cells = {cell.cell for cell in cells}
    descriptions = []
    for engine in dict.fromkeys(cell.cell.engine for cell in cells):
        version = get_engine_version(engine)
        # Search all cells: the user's entry may be for a release that another spelling of the engine names.
        matched = [
            find_expected_failure(cell.cell, version, user_failures) for cell in cells if not cell.unsupported_reason
        ]
        descriptions += [
            f"{entry.location}: no cell of {entry.engine} {version} matches the expected failure of "
            f"{', '.join(entry.laws)} ({entry.upstream}), or an earlier entry matches them all; delete this entry, or "
            "narrow its releases"
            for entry in expected_failures_for(engine, user_failures)
            if entry.applies_to_version(version)
            and not any(entry is match for match in matched)
            and not (entry.models and all(map(is_user_model, entry.models)))  # no run has every model of users
            and is_fully_run(list(iter_covered_cells(entry, engine, version, claims)), run_cells, engine)
        ]
    return descriptions


def is_fully_run(covered: Sequence[PlannedCell], run_cells: Set[Cell], engine: str) -> bool:
    """Return whether all supported cells of ``covered`` were run.

    If no cell is supported, return whether any cell was run, or False if ``engine`` names a release, because the
    release may lack what the law needs.
    """
    supported = [cell for cell in covered if not cell.unsupported_reason]
    if supported:
        return all(cell.cell in run_cells for cell in supported)
    if split_release(engine)[1] is not None:
        return False
    return not covered or any(cell.cell in run_cells for cell in covered)


def iter_covered_cells(
    expected_failure: ExpectedFailure, engine: str, version: str, claims: ClaimsLookup
) -> Iterator[PlannedCell]:
    """Yield all cells that an expected failure covers, whether or not a run has them.

    An entry without world sizes counts as an entry for 2 ranks.
    """
    engine_stages = first_buildable_claims(engine, STAGES, claims).stages
    stages = tuple(stage for stage in expected_failure.stages or sorted(engine_stages) if stage in engine_stages)
    if not stages:
        return
    settings = product(expected_failure.engine_variants or ("",), expected_failure.meshes or (DEFAULT_MESH.label,))
    for engine_variant, mesh in settings:
        request = Request(
            patterns=expected_failure.laws,
            engines=(engine,),
            stages=stages,
            world_sizes=expected_failure.world_sizes or (2,),
            dtypes=expected_failure.dtypes or tuple(DTYPES),
            engine_variant=engine_variant,
            mesh=Mesh.parse(mesh),
        )
        for cell in plan(request, claims):
            if expected_failure.covers_cell(cell.cell, version):
                yield cell
