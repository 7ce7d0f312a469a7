"""Decide on which meshes programs can be judged: on meshes whose axes replicate weights and split no layer."""

from __future__ import annotations

from collections.abc import Sequence

from zharness.errors import UsageError
from zharness.laws import find_laws
from zharness.mesh import REPLICATE, Mesh
from zharness.run.claims import list_known_claims
from zharness.run.mesh_claims import has_cells_on, needs_mesh, require_mesh_at_some_stage
from zharness.world.limits import check_world_size


def require_program_mesh(engine: str, mesh: Mesh, world_sizes: Sequence[int]) -> None:
    """Raise UsageError for a mesh on which no program is judged, or that one of ``world_sizes`` cannot form.

    The weights of a program's layers are random. If an axis splits a layer, the partial sums of the ranks are rounded
    in other places than the sums of plain PyTorch, so that every output would need a tolerance.
    """
    split = next((axis for axis in mesh.axes if axis != REPLICATE), "")
    if split:
        require_claimed_axes(engine, mesh)
        sizes = [size for size in world_sizes if not mesh.explain_misfit(size)] or [mesh.smallest_world]
        ranks = ",".join(map(str, sizes))
        law, options = find_program_law(split), f"--engine {engine} --world-size {ranks} --mesh {mesh.label} --seed N"
        raise UsageError(
            f"got the mesh {mesh.label}; programs have layers of random weights, and only sums of integers could be "
            f"compared where {split} splits them; run: zharness check {law} {options}, "
            "which draws programs on models of integers"
        )
    for size in world_sizes:
        check_world_size(size)
        mesh.shape(size)  # raises UsageError if the mesh does not fit


def require_claimed_axes(engine: str, mesh: Mesh) -> None:
    """Raise UsageError if ``engine`` is known to claim an axis of ``mesh`` at no stage."""
    if claims := list_known_claims(engine, ()):
        require_mesh_at_some_stage(engine, mesh, (), claims)


def find_program_law(axis: str) -> str:
    """Return the name of the first law that draws programs on models that ``axis`` splits exactly."""
    on_meshes = (law for law in find_laws(()) if law.programs is not None and needs_mesh(law))
    return next(law.name for law in on_meshes if has_cells_on(law, axis, ()))
