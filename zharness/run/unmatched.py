"""Excuses that match nothing, told by the runs that would have met them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from zharness.case import Case
from zharness.checks import DTYPES
from zharness.engines import registry
from zharness.run.excuses import Excuse, excuses_for, find
from zharness.run.plan import Claims, Planned, Request, any_claims, plan


def unmatched(cells: Sequence[Planned], claims: Claims, own: Sequence[Excuse] = ()) -> list[str]:
    """In words, each excuse for an engine of ``cells`` that none of them meets, and which line to delete.

    Only a run that has every cell of which an excuse speaks may say so. An excuse that is met but no longer needed is
    no matter of the plan: its cell's record says that it is stale.
    """
    run = {cell.case for cell in cells}
    found = []
    for engine in dict.fromkeys(cell.case.engine for cell in cells):
        version = registry.version(engine) or "(no release)"
        # Of all cells: an entry of the user's may be for a release that another spelling of the engine names.
        met = [find(cell.case, version, own) for cell in cells if not cell.unsupported]
        found += [
            f"{excuse.place}: no cell of {excuse.engine} {version} meets the excuse for {excuse.check} "
            f"({excuse.upstream}), or an entry before it meets them all; delete it, or narrow its releases"
            for excuse in excuses_for(engine, own)
            if excuse.speaks_of(version)
            and not any(excuse is one for one in met)
            and whole(spoken_of(excuse, engine, version, claims), run)
        ]
    return found


def whole(spoken: Iterator[Planned], run: Set[Case]) -> bool:
    """Whether all cells that an excuse speaks of were run, or any of them where none is supported."""
    told = list(spoken)
    supported = [cell for cell in told if not cell.unsupported]
    if supported:
        return all(cell.case in run for cell in supported)
    return not told or any(cell.case in run for cell in told)


def spoken_of(excuse: Excuse, engine: str, version: str, claims: Claims) -> Iterator[Planned]:
    """The cells of the whole matrix that an excuse covers; where it names no world size, those of 2 ranks."""
    offered = any_claims(engine, (0, 1, 2, 3), claims).stages
    stages = tuple(stage for stage in excuse.stages or sorted(offered) if stage in offered)
    if not stages:
        return
    for engine_variant in excuse.engine_variants or ("",):
        request = Request(
            patterns=(excuse.check,),
            engines=(engine,),
            stages=stages,
            world_sizes=excuse.world_sizes or (2,),
            dtypes=excuse.dtypes or tuple(DTYPES),
            engine_variant=engine_variant,
        )
        for cell in plan(request, claims):
            if excuse.covers(cell.case, version):
                yield cell
