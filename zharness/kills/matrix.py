"""Who kills whom, and what follows from it for the mutants and for the checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from tabulate import tabulate

from zharness.kills.cells import target_case
from zharness.kills.kept import reason_for
from zharness.mutants import MUTANTS, PATH, Kind, Mutant
from zharness.run import Record, Verdict


@dataclass(frozen=True)
class Matrix:
    """The records of some mutants. ``asked`` are the checks that were tried on them."""

    mutants: tuple[Mutant, ...]
    asked: tuple[str, ...]
    records: tuple[Record, ...]

    def killers(self, mutant: Mutant) -> dict[str, Record]:
        """The checks that kill ``mutant``, each with the first record that does."""
        found: dict[str, Record] = {}
        for record in self.records:
            if record.case.engine == mutant.engine and record.verdict.broken and record.case.check in self.asked:
                found.setdefault(record.case.check, record)
        return {check: found[check] for check in self.asked if check in found}

    def table(self) -> Mapping[str, tuple[str, ...]]:
        """The killers of each mutant."""
        return {mutant.name: tuple(self.killers(mutant)) for mutant in self.mutants}

    def survivors(self) -> list[Mutant]:
        """Mutants that no check kills and that are not equivalent."""
        return [mutant for mutant in self.mutants if not mutant.equivalent and not self.killers(mutant)]

    def no_longer_equivalent(self) -> list[Mutant]:
        """Mutants that are said to change nothing and are killed: a false alarm, or a wrong reason."""
        return [mutant for mutant in self.mutants if mutant.equivalent and self.killers(mutant)]

    def victims(self) -> dict[str, tuple[str, ...]]:
        """The mutants that each check kills."""
        table = self.table()
        return {check: tuple(name for name, killers in table.items() if check in killers) for check in self.asked}

    def sole(self) -> dict[str, tuple[str, ...]]:
        """The mutants whose only killer a check is."""
        alone = {name: killers[0] for name, killers in self.table().items() if len(killers) == 1}
        return {check: tuple(name for name, killer in alone.items() if killer == check) for check in self.asked}

    def idle(self) -> list[str]:
        """Checks that kill nobody; told only where every mutant was tried."""
        complete = len(self.mutants) == len(MUTANTS)
        return [check for check, names in self.victims().items() if not names] if complete else []

    def unexplained(self) -> list[str]:
        """Checks that are nobody's only killer and do not say why they are kept; told as ``idle`` is."""
        complete = len(self.mutants) == len(MUTANTS)
        return (
            [check for check, names in self.sole().items() if not names and not reason_for(check)] if complete else []
        )

    def named(self) -> tuple[int, list[str]]:
        """Of how many targets the first divergence was looked at, and the words of those in which it is wrong."""
        by_case = {record.case: record for record in self.records}
        looked, wrong = 0, []
        for mutant in self.mutants:
            for target in mutant.targets:
                record = by_case.get(target_case(mutant, target))
                if record is not None and record.verdict.broken:
                    looked += 1
                    if not target.named_by(record.divergence, record.cause):
                        expected = f"{target.part.value if target.part else 'no number'} of {target.parameter}"
                        wrong.append(f"{record.case.id}: expected {expected}, got {record.cause}")
        return looked, wrong

    def errors(self) -> list[Record]:
        """Cells in which the harness failed."""
        return [record for record in self.records if record.verdict is Verdict.ERROR]

    def exit_code(self) -> int:
        """3 when the harness failed, 1 for a survivor or a check without a use, else 0."""
        if self.errors():
            return 3
        bad = (self.survivors(), self.no_longer_equivalent(), self.idle(), self.unexplained())
        return 1 if any(bad) else 0


def words(matrix: Matrix) -> str:
    """The matrix for a terminal: mutants, checks, and a summary."""
    parts = [mutants_table(matrix), checks_table(matrix), kinds_table(matrix), *complaints(matrix), summary(matrix)]
    return "\n\n".join(part for part in parts if part)


def mutants_table(matrix: Matrix) -> str:
    """A row for each mutant."""
    rows = []
    for mutant in matrix.mutants:
        killers = list(matrix.killers(mutant))
        shown = ", ".join(killers[:3]) + (", ..." if len(killers) > 3 else "")
        verdict = shown or (f"equivalent: {mutant.equivalent}" if mutant.equivalent else "SURVIVES")
        stages = ",".join(map(str, mutant.stages))
        rows.append([mutant.name, mutant.over, stages, len(killers), verdict])
    return tabulate(
        rows, ["mutant", "over", "stage", "killers", "killed by"], maxcolwidths=[None, None, None, None, 70]
    )


def checks_table(matrix: Matrix) -> str:
    """A row for each check that was tried."""
    victims, sole = matrix.victims(), matrix.sole()
    rows = [[check, len(victims[check]), ", ".join(sole[check]) or reason_for(check)] for check in matrix.asked]
    return tabulate(rows, ["check", "kills", "only killer of, or why it is kept"], maxcolwidths=[None, None, 80])


def kinds_table(matrix: Matrix) -> str:
    """A row for each kind of fault: mutants, and the checks that kill the hardest and the middle one of them."""
    table, rows = matrix.table(), []
    for kind in Kind:
        real = [mutant for mutant in matrix.mutants if mutant.kind is kind and not mutant.equivalent]
        if real:
            killers = [len(table[mutant.name]) for mutant in real]
            bugs = sum(bool(mutant.imitates) for mutant in real)
            rows.append([kind.value, len(real), bugs, min(killers), median_low(killers)])
    return tabulate(rows, ["what is wrong", "mutants", "imitate a known bug", "killers: least", "median"])


def complaints(matrix: Matrix) -> Iterable[str]:
    """A paragraph for each kind of thing that is wrong."""
    kinds: Sequence[tuple[str, Sequence[str]]] = (
        ("survives every check", [mutant.name for mutant in matrix.survivors()]),
        ("is said to be equivalent and is killed", [mutant.name for mutant in matrix.no_longer_equivalent()]),
        ("kills no mutant", matrix.idle()),
        ("is nobody's only killer, and kills/kept.py gives no reason to keep it", matrix.unexplained()),
        ("names something else", matrix.named()[1]),
        ("is a failure of the harness", [f"{record.case.id}: {record.cause}" for record in matrix.errors()]),
    )
    return ["\n".join(f"{name} {what}" for name in names) for what, names in kinds if names]


def summary(matrix: Matrix) -> str:
    """One line."""
    real = [mutant for mutant in matrix.mutants if not mutant.equivalent]
    looked, wrong = matrix.named()
    return (
        f"{len(real) - len(matrix.survivors())} of {len(real)} mutants killed by {len(matrix.asked)} checks "
        f"({len(matrix.records)} cells); the first divergence is right in {looked - len(wrong)} of {looked} targets"
    )


def by_case(records: Iterable[Record]) -> dict[str, Record]:
    """Records of mutants alone, by the id of their case."""
    return {record.case.id: record for record in records if record.case.engine.startswith(PATH)}
