"""Excuses that match nothing, told by the runs that would have met them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from zharness.cell import Cell
from zharness.engines import registry
from zharness.laws import DTYPES
from zharness.run.expected_failures import ExpectedFailure, expected_failures_for, find_expected_failure
from zharness.run.plan import ClaimsLookup, PlannedCell, Request, first_buildable_claims, plan


def describe_unmatched_failures(
    cells: Sequence[PlannedCell], claims: ClaimsLookup, user_failures: Sequence[ExpectedFailure] = ()
) -> list[str]:
    """In words, each excuse for an engine of ``cells`` that none of them meets, and which line to delete.

    Only a run that has every cell of which an excuse speaks may say so. An excuse that is met but no longer needed is
    no matter of the plan: its cell's record says that it is stale.
    """
    run = {cell.cell for cell in cells}
    found = []
    for engine in dict.fromkeys(cell.cell.engine for cell in cells):
        version = registry.resolve_version(engine) or "(no release)"
        # Of all cells: an entry of the user's may be for a release that another spelling of the engine names.
        met = [
            find_expected_failure(cell.cell, version, user_failures) for cell in cells if not cell.unsupported_reason
        ]
        found += [
            f"{excuse.location}: no cell of {excuse.engine} {version} meets the excuse for {excuse.check} "
            f"({excuse.upstream}), or an entry before it meets them all; delete it, or narrow its releases"
            for excuse in expected_failures_for(engine, user_failures)
            if excuse.applies_to_version(version)
            and not any(excuse is one for one in met)
            and is_fully_run(iter_covered_cells(excuse, engine, version, claims), run)
        ]
    return found


def is_fully_run(covered_cells: Iterator[PlannedCell], run_cells: Set[Cell]) -> bool:
    """Whether all cells that an excuse speaks of were run, or any of them where none is supported."""
    told = list(covered_cells)
    supported = [cell for cell in told if not cell.unsupported_reason]
    if supported:
        return all(cell.cell in run_cells for cell in supported)
    return not told or any(cell.cell in run_cells for cell in told)


def iter_covered_cells(
    expected_failure: ExpectedFailure, engine: str, version: str, claims: ClaimsLookup
) -> Iterator[PlannedCell]:
    """The cells of the whole matrix that an excuse covers; where it names no world size, those of 2 ranks."""
    offered = first_buildable_claims(engine, (0, 1, 2, 3), claims).stages
    stages = tuple(stage for stage in expected_failure.stages or sorted(offered) if stage in offered)
    if not stages:
        return
    for engine_variant in expected_failure.engine_variants or ("",):
        request = Request(
            patterns=(expected_failure.check,),
            engines=(engine,),
            stages=stages,
            world_sizes=expected_failure.world_sizes or (2,),
            dtypes=expected_failure.dtypes or tuple(DTYPES),
            engine_variant=engine_variant,
        )
        for cell in plan(request, claims):
            if expected_failure.covers_cell(cell.cell, version):
                yield cell
