"""Which cells try to kill which mutant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zharness import engines
from zharness.cell import Cell
from zharness.laws import Law
from zharness.mutants import Mutant, Target
from zharness.run import PlannedCell
from zharness.run.expected_failures import find_expected_failure
from zharness.run.plan import unsupported_reason


@dataclass(frozen=True)
class KillAttempts:
    """The cells of one check on one mutant, in the order in which they are tried, until one kills it."""

    mutant: Mutant
    law: str
    cells: tuple[PlannedCell, ...]


def make_target_cell(mutant: Mutant, target: Target) -> Cell:
    """The cell that ``target`` names."""
    stage = mutant.stages[0] if target.stage is None else target.stage
    return Cell(target.law, mutant.engine, stage, target.world_size, target.dtype, target.model, target.variant)


def plan_kill_attempts(
    mutant: Mutant, law: Law, world_sizes: tuple[int, ...] = (2,), models: tuple[str, ...] = ()
) -> KillAttempts:
    """The cells of ``check`` on ``mutant``: the mutant's own targets, then its stages, in fp32.

    ``models`` narrows the check's models; its first alone where none is named.
    """
    own = [make_target_cell(mutant, target) for target in mutant.targets if target.law == law.name]
    chosen = [model for model in law.models if model in models] if models else law.models[:1]
    rest = [
        Cell(law.name, mutant.engine, stage, world_size, "fp32", model, variant.name)
        for world_size in world_sizes
        for model in chosen
        for stage in mutant.stages
        for variant in law.variants
    ]
    others = [case for case in dict.fromkeys(rest) if case not in own]
    # A target names the part and the parameter that the engine around it, whatever is known of it there, has right.
    claimed = [PlannedCell(case) for case in own if not unsupported_reason(law, case, mutant.claims(case.stage))]
    return KillAttempts(mutant, law.name, (*claimed, *select_runnable_cells(mutant, law, others)))


def select_runnable_cells(mutant: Mutant, law: Law, cells: Sequence[Cell]) -> Iterator[PlannedCell]:
    """The cells in which the engine that the mutant is built around is right."""
    for case in cells:
        right = replace(case, engine=mutant.over)
        known = find_expected_failure(right, engines.info(mutant.over).version() or "")
        if known is None and not unsupported_reason(law, case, mutant.claims(case.stage)):
            yield PlannedCell(case)
