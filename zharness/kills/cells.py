"""Which cells try to kill which mutant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zharness import engines
from zharness.case import Case
from zharness.checks import Check
from zharness.mutants import Mutant, Target
from zharness.run import Planned
from zharness.run.excuses import find
from zharness.run.plan import unsupported


@dataclass(frozen=True)
class Attempts:
    """The cells of one check on one mutant, in the order in which they are tried, until one kills it."""

    mutant: Mutant
    check: str
    cells: tuple[Planned, ...]


def target_case(mutant: Mutant, target: Target) -> Case:
    """The cell that ``target`` names."""
    stage = mutant.stages[0] if target.stage is None else target.stage
    return Case(target.check, mutant.engine, stage, target.world_size, target.dtype, target.model, target.variant)


def attempts(
    mutant: Mutant, check: Check, world_sizes: tuple[int, ...] = (2,), models: tuple[str, ...] = ()
) -> Attempts:
    """The cells of ``check`` on ``mutant``: the mutant's own targets, then its stages, in fp32.

    ``models`` narrows the check's models; its first alone where none is named.
    """
    own = [target_case(mutant, target) for target in mutant.targets if target.check == check.name]
    chosen = [model for model in check.models if model in models] if models else check.models[:1]
    rest = [
        Case(check.name, mutant.engine, stage, world_size, "fp32", model, variant)
        for world_size in world_sizes
        for model in chosen
        for stage in mutant.stages
        for variant, _ in check.variants
    ]
    others = [case for case in dict.fromkeys(rest) if case not in own]
    # A target names the part and the parameter that the engine around it, whatever is known of it there, has right.
    claimed = [Planned(case) for case in own if not unsupported(check, case, mutant.claims(case.stage))]
    return Attempts(mutant, check.name, (*claimed, *runnable(mutant, check, others)))


def runnable(mutant: Mutant, check: Check, cases: Sequence[Case]) -> Iterator[Planned]:
    """The cells in which the engine that the mutant is built around is right."""
    for case in cases:
        right = replace(case, engine=mutant.over)
        known = find(right, engines.info(mutant.over).version() or "")
        if known is None and not unsupported(check, case, mutant.claims(case.stage)):
            yield Planned(case)
