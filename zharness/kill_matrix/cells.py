"""Choose the cells that are run to kill each mutant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zharness import engines
from zharness.cell import Cell
from zharness.laws import Law
from zharness.mesh import Mesh
from zharness.mutants import Mutant, Target
from zharness.run import PlannedCell
from zharness.run.cell_planner import unsupported_reason
from zharness.run.matching_failures import find_expected_failure


@dataclass(frozen=True)
class KillAttempts:
    """The cells of one law on one mutant, in the order in which they run until one of them kills the mutant."""

    mutant: Mutant
    law: str
    cells: tuple[PlannedCell, ...]


def make_target_cell(mutant: Mutant, target: Target) -> Cell:
    """Return the cell in which ``target`` says that ``mutant`` has to be killed."""
    stage = mutant.stages[0] if target.stage is None else target.stage
    axes = (stage, target.world_size, target.dtype, target.model, target.variant)
    return Cell(target.law, mutant.engine, *axes, target.setting, Mesh.parse(target.mesh))


def plan_kill_attempts(
    mutant: Mutant, law: Law, world_sizes: tuple[int, ...] = (2,), models: tuple[str, ...] = ()
) -> KillAttempts:
    """Return the cells of ``law`` on ``mutant``: first the mutant's targets, then fp32 cells at the mutant's stages.

    The fp32 cells use ``world_sizes`` and those of the law's models that are in ``models``; if ``models`` is empty,
    they use the law's first model.
    """
    targets = plan_targets(mutant, law)
    chosen = [model for model in law.models if model in models] if models else law.models[:1]
    rest = [
        Cell(law.name, mutant.engine, stage, world_size, "fp32", model, variant)
        for world_size in world_sizes
        for model in chosen
        for stage in mutant.stages
        for variant in law.workload_variants
    ]
    others = [cell for cell in dict.fromkeys(rest) if PlannedCell(cell) not in targets]
    return KillAttempts(mutant, law.name, (*targets, *select_runnable_cells(mutant, law, others)))


def plan_targets(mutant: Mutant, law: Law) -> list[PlannedCell]:
    """Return the cells of ``law`` that have to kill ``mutant``, without cells that the mutant does not support.

    A target runs even if the correct engine is known to fail in the cell: the part of the step and the parameter
    distinguish the two failures.
    """
    cells = [make_target_cell(mutant, target) for target in mutant.targets if target.law == law.name]
    return [PlannedCell(cell) for cell in cells if not unsupported_reason(law, cell, mutant.claims(cell.stage))]


def select_runnable_cells(mutant: Mutant, law: Law, cells: Sequence[Cell]) -> Iterator[PlannedCell]:
    """Yield those of ``cells`` that the mutant's correct engine supports and in which it is not known to fail.

    The correct engine is the engine without the fault, around which the mutant is built.
    """
    for cell in cells:
        correct = replace(cell, engine=mutant.wraps)
        known = find_expected_failure(correct, engines.info(mutant.wraps).version() or "")
        if known is None and not unsupported_reason(law, cell, mutant.claims(cell.stage)):
            yield PlannedCell(cell)
