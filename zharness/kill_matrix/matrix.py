"""Who kills whom, and what follows from it for the mutants and for the checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from tabulate import tabulate

from zharness.kill_matrix.cells import make_target_cell
from zharness.laws import LAWS
from zharness.mutants import MUTANTS, PATH, FaultKind, Mutant
from zharness.run import Record, Verdict


@dataclass(frozen=True)
class KillMatrix:
    """The records of some mutants. ``asked`` are the checks that were tried on them."""

    mutants: tuple[Mutant, ...]
    laws: tuple[str, ...]
    records: tuple[Record, ...]

    def killers(self, mutant: Mutant) -> dict[str, Record]:
        """The checks that kill ``mutant``, each with the first record that does."""
        found: dict[str, Record] = {}
        for record in self.records:
            if record.cell.engine == mutant.engine and record.verdict.is_broken and record.cell.law in self.laws:
                found.setdefault(record.cell.law, record)
        return {check: found[check] for check in self.laws if check in found}

    def killers_by_mutant(self) -> Mapping[str, tuple[str, ...]]:
        """The killers of each mutant."""
        return {mutant.name: tuple(self.killers(mutant)) for mutant in self.mutants}

    def survivors(self) -> list[Mutant]:
        """Mutants that no check kills and that are not equivalent."""
        return [mutant for mutant in self.mutants if not mutant.equivalent and not self.killers(mutant)]

    def killed_equivalents(self) -> list[Mutant]:
        """Mutants that are said to change nothing and are killed: a false alarm, or a wrong reason."""
        return [mutant for mutant in self.mutants if mutant.equivalent and self.killers(mutant)]

    def kills_by_law(self) -> dict[str, tuple[str, ...]]:
        """The mutants that each check kills."""
        table = self.killers_by_mutant()
        return {check: tuple(name for name, killers in table.items() if check in killers) for check in self.laws}

    def sole_kills_by_law(self) -> dict[str, tuple[str, ...]]:
        """The mutants whose only killer a check is."""
        alone = {name: killers[0] for name, killers in self.killers_by_mutant().items() if len(killers) == 1}
        return {check: tuple(name for name, killer in alone.items() if killer == check) for check in self.laws}

    def laws_without_kills(self) -> list[str]:
        """Checks that kill nobody; told only where every mutant was tried."""
        complete = len(self.mutants) == len(MUTANTS)
        return [check for check, names in self.kills_by_law().items() if not names] if complete else []

    def laws_without_reason(self) -> list[str]:
        """Checks that are nobody's only killer and do not say why they are kept; told as ``idle`` is."""
        complete = len(self.mutants) == len(MUTANTS)
        return (
            [check for check, names in self.sole_kills_by_law().items() if not names and not LAWS[check].kept_because]
            if complete
            else []
        )

    def check_named_divergences(self) -> tuple[int, list[str]]:
        """Of how many targets the first divergence was looked at, and the words of those in which it is wrong."""
        by_case = {record.cell: record for record in self.records}
        looked, wrong = 0, []
        for mutant in self.mutants:
            for target in mutant.targets:
                record = by_case.get(make_target_cell(mutant, target))
                if record is not None and record.verdict.is_broken:
                    looked += 1
                    if not target.named_by(record.divergence, record.cause):
                        expected = f"{target.part.value if target.part else 'no number'} of {target.parameter}"
                        wrong.append(f"{record.cell.id}: expected {expected}, got {record.cause}")
        return looked, wrong

    def errors(self) -> list[Record]:
        """Cells in which the harness failed."""
        return [record for record in self.records if record.verdict is Verdict.ERROR]

    def exit_code(self) -> int:
        """3 when the harness failed, 1 for a survivor or a check without a use, else 0."""
        if self.errors():
            return 3
        bad = (self.survivors(), self.killed_equivalents(), self.laws_without_kills(), self.laws_without_reason())
        return 1 if any(bad) else 0


def render_matrix(matrix: KillMatrix) -> str:
    """The matrix for a terminal: mutants, checks, and a summary."""
    parts = [
        render_mutants_table(matrix),
        render_laws_table(matrix),
        render_fault_kinds_table(matrix),
        *list_complaints(matrix),
        summarize_kills(matrix),
    ]
    return "\n\n".join(part for part in parts if part)


def render_mutants_table(matrix: KillMatrix) -> str:
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


def render_laws_table(matrix: KillMatrix) -> str:
    """A row for each check that was tried."""
    victims, sole = matrix.kills_by_law(), matrix.sole_kills_by_law()
    rows = [[check, len(victims[check]), ", ".join(sole[check]) or LAWS[check].kept_because] for check in matrix.laws]
    return tabulate(rows, ["check", "kills", "only killer of, or why it is kept"], maxcolwidths=[None, None, 80])


def render_fault_kinds_table(matrix: KillMatrix) -> str:
    """A row for each kind of fault: mutants, and the checks that kill the hardest and the middle one of them."""
    table, rows = matrix.killers_by_mutant(), []
    for kind in FaultKind:
        real = [mutant for mutant in matrix.mutants if mutant.kind is kind and not mutant.equivalent]
        if real:
            killers = [len(table[mutant.name]) for mutant in real]
            bugs = sum(bool(mutant.imitates) for mutant in real)
            rows.append([kind.value, len(real), bugs, min(killers), median_low(killers)])
    return tabulate(rows, ["what is wrong", "mutants", "imitate a known bug", "killers: least", "median"])


def list_complaints(matrix: KillMatrix) -> Iterable[str]:
    """A paragraph for each kind of thing that is wrong."""
    kinds: Sequence[tuple[str, Sequence[str]]] = (
        ("survives every check", [mutant.name for mutant in matrix.survivors()]),
        ("is said to be equivalent and is killed", [mutant.name for mutant in matrix.killed_equivalents()]),
        ("kills no mutant", matrix.laws_without_kills()),
        ("is nobody's only killer, and its kept_because is empty", matrix.laws_without_reason()),
        ("names something else", matrix.check_named_divergences()[1]),
        ("is a failure of the harness", [f"{record.cell.id}: {record.cause}" for record in matrix.errors()]),
    )
    return ["\n".join(f"{name} {what}" for name in names) for what, names in kinds if names]


def summarize_kills(matrix: KillMatrix) -> str:
    """One line."""
    real = [mutant for mutant in matrix.mutants if not mutant.equivalent]
    looked, wrong = matrix.check_named_divergences()
    return (
        f"{len(real) - len(matrix.survivors())} of {len(real)} mutants killed by {len(matrix.laws)} checks "
        f"({len(matrix.records)} cells); the first divergence is right in {looked - len(wrong)} of {looked} targets"
    )


def index_mutant_records(records: Iterable[Record]) -> dict[str, Record]:
    """Records of mutants alone, by the id of their case."""
    return {record.cell.id: record for record in records if record.cell.engine.startswith(PATH)}
