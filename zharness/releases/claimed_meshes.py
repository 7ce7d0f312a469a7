"""Decide which releases can run the cells of a mesh, before any of them is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zharness.cell import Cell, is_cell_id
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.run import Request
from zharness.run.claims import list_known_claims
from zharness.run.mesh_claims import UnclaimedAxes, require_mesh_at_some_stage


def require_mesh_of_any(release_engines: Sequence[str], request: Request) -> Request:
    """Return ``request``, changed so that cells are unsupported on ``release_engines`` that do not claim its mesh.

    The claims of an engine that are unknown before it is built are checked when its cells are planned. Raises
    UsageError if every release is known not to claim the mesh, with the reason of the last release.
    """
    for part in split_by_mesh(request):
        claims = {engine: list_known_claims(engine, part.stages) for engine in release_engines}
        if not all(claims.values()):
            return request
        errors = [error for engine in claims if (error := find_mesh_error(engine, part, claims[engine]))]
        if len(errors) == len(claims):
            raise errors[-1]
    return replace(request, unclaimed_axes=UnclaimedAxes.UNSUPPORTED)


def split_by_mesh(request: Request) -> Iterator[Request]:
    """Yield ``request`` unless it names only cells, and a request for each cell that it names, with the cell's mesh."""
    names = [pattern for pattern in request.patterns if is_cell_id(pattern)]
    if not names or len(names) < len(request.patterns):
        yield request
    for cell in map(Cell.parse, names):
        yield replace(request, stages=(cell.stage,), world_sizes=(cell.world_size,), mesh=cell.mesh)


def find_mesh_error(engine: str, request: Request, claims: Sequence[Capabilities]) -> UsageError | None:
    """Return the error that says why ``engine``, which has ``claims``, cannot have the mesh; None if it can."""
    try:
        require_mesh_at_some_stage(engine, request.mesh, request.world_sizes, claims)
    except UsageError as error:
        return error
    return None
