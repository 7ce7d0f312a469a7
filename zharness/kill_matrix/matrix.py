"""The kill matrix, a table of which law kills which mutant, and its rendering for a terminal."""

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
    """The records of cells on ``mutants``, and the names of the ``laws`` that were run on them."""

    mutants: tuple[Mutant, ...]
    laws: tuple[str, ...]
    records: tuple[Record, ...]

    def killers(self, mutant: Mutant) -> dict[str, Record]:
        """Return a mapping from each law that kills ``mutant`` to the first record in which the law kills it."""
        found: dict[str, Record] = {}
        for record in self.records:
            if record.cell.engine == mutant.engine and record.verdict.is_broken and record.cell.law in self.laws:
                found.setdefault(record.cell.law, record)
        return {law: found[law] for law in self.laws if law in found}

    def killers_by_mutant(self) -> Mapping[str, tuple[str, ...]]:
        """Return a mapping from the name of each mutant to the names of the laws that kill it."""
        return {mutant.name: tuple(self.killers(mutant)) for mutant in self.mutants}

    def survivors(self) -> list[Mutant]:
        """Return the mutants that no law kills, except those that are declared equivalent to the correct engine."""
        return [mutant for mutant in self.mutants if not mutant.equivalent and not self.killers(mutant)]

    def killed_equivalents(self) -> list[Mutant]:
        """Return the mutants that some law kills although they are declared equivalent to the correct engine.

        Each of them shows either a false alarm of the law or a wrong declaration.
        """
        return [mutant for mutant in self.mutants if mutant.equivalent and self.killers(mutant)]

    def kills_by_law(self) -> dict[str, tuple[str, ...]]:
        """Return a mapping from the name of each law to the names of the mutants that the law kills."""
        table = self.killers_by_mutant()
        return {law: tuple(name for name, killers in table.items() if law in killers) for law in self.laws}

    def sole_kills_by_law(self) -> dict[str, tuple[str, ...]]:
        """Return, for each law, the names of the mutants that no other law kills."""
        sole_killers = {name: killers[0] for name, killers in self.killers_by_mutant().items() if len(killers) == 1}
        return {law: tuple(name for name, killer in sole_killers.items() if killer == law) for law in self.laws}

    def laws_without_kills(self) -> list[str]:
        """Return the names of the laws that kill no mutant; the list is empty unless all mutants were run."""
        complete = len(self.mutants) == len(MUTANTS)
        return [law for law, names in self.kills_by_law().items() if not names] if complete else []

    def laws_without_reason(self) -> list[str]:
        """Return the laws that are not the only killer of any mutant and whose ``kept_because`` is empty.

        The list is empty unless all mutants were run.
        """
        complete = len(self.mutants) == len(MUTANTS)
        return (
            [law for law, names in self.sole_kills_by_law().items() if not names and not LAWS[law].kept_because]
            if complete
            else []
        )

    def check_named_divergences(self) -> tuple[int, list[str]]:
        """Return the number of killed targets, and a message for each killed target with an unexpected divergence."""
        by_cell = {record.cell: record for record in self.records}
        killed_count, messages = 0, []
        for mutant in self.mutants:
            for target in mutant.targets:
                record = by_cell.get(make_target_cell(mutant, target))
                if record is not None and record.verdict.is_broken:
                    killed_count += 1
                    if not target.named_by(record.divergence, record.cause):
                        expected = f"{target.part.value if target.part else 'no number'} of {target.parameter}"
                        expected += f" with {target.cause!r}" if target.cause else ""
                        messages.append(
                            f"{record.cell.id}: expected the first divergence in {expected}; got {record.cause}"
                        )
        return killed_count, messages

    def survived_targets(self) -> list[Record]:
        """Return the records of targets that did not kill their mutant, without errors of the harness."""
        targets = {make_target_cell(mutant, target) for mutant in self.mutants for target in mutant.targets}
        ended = [record for record in self.records if record.cell in targets and not record.verdict.is_broken]
        return [record for record in ended if record.verdict is not Verdict.ERROR]

    def errors(self) -> list[Record]:
        """Return the records of cells in which the harness failed."""
        return [record for record in self.records if record.verdict is Verdict.ERROR]

    def exit_code(self) -> int:
        """Return 3 if the harness failed in a cell, 1 if the matrix shows a problem, or 0.

        A problem is a mutant that survives all laws or one of its targets, an equivalent mutant that is killed, a law
        that kills no mutant, or a law that is no mutant's only killer and has no reason to be kept.
        """
        if self.errors():
            return 3
        of_mutants = (self.survivors(), self.survived_targets(), self.killed_equivalents())
        return 1 if any((*of_mutants, self.laws_without_kills(), self.laws_without_reason())) else 0


def render_matrix(matrix: KillMatrix) -> str:
    """Render the kill matrix for a terminal: tables of mutants, laws and kinds of faults, problems, a summary."""
    parts = [
        render_mutants_table(matrix),
        render_laws_table(matrix),
        render_fault_kinds_table(matrix),
        *list_complaints(matrix),
        summarize_kills(matrix),
    ]
    return "\n\n".join(part for part in parts if part)


def render_mutants_table(matrix: KillMatrix) -> str:
    """Render a table that has a row with the killers of each mutant."""
    rows = []
    for mutant in matrix.mutants:
        killers = list(matrix.killers(mutant))
        shown = ", ".join(killers[:3]) + (", ..." if len(killers) > 3 else "")
        verdict = shown or (f"equivalent: {mutant.equivalent}" if mutant.equivalent else "SURVIVES")
        stages = ",".join(map(str, mutant.stages))
        rows.append([mutant.name, mutant.wraps, stages, len(killers), verdict])
    return tabulate(
        rows, ["mutant", "wraps", "stage", "killers", "killed by"], maxcolwidths=[None, None, None, None, 70]
    )


def render_laws_table(matrix: KillMatrix) -> str:
    """Render a table that has a row with the number of kills of each law that was run."""
    kills, sole_kills = matrix.kills_by_law(), matrix.sole_kills_by_law()
    ran = {record.cell.law for record in matrix.records}
    rows = [
        [law, len(kills[law]), ", ".join(sole_kills[law]) or LAWS[law].kept_because]
        for law in matrix.laws
        if law in ran
    ]
    return tabulate(rows, ["law", "kills", "only killer of, or why it is kept"], maxcolwidths=[None, None, 80])


def render_fault_kinds_table(matrix: KillMatrix) -> str:
    """Render a table that has a row for each kind of fault.

    A row has the number of mutants of this kind, and the smallest and the median number of laws that kill such a
    mutant.
    """
    table, rows = matrix.killers_by_mutant(), []
    for kind in FaultKind:
        real = [mutant for mutant in matrix.mutants if mutant.kind is kind and not mutant.equivalent]
        if real:
            killers = [len(table[mutant.name]) for mutant in real]
            bugs = sum(bool(mutant.imitates) for mutant in real)
            rows.append([kind.value, len(real), bugs, min(killers), median_low(killers)])
    return tabulate(rows, ["what is wrong", "mutants", "imitate a known bug", "killers: least", "median"])


def list_complaints(matrix: KillMatrix) -> Iterable[str]:
    """Return a paragraph for each kind of problem, with a line for each mutant, law or cell that has the problem."""
    kinds: Sequence[tuple[str, Sequence[str]]] = (
        ("survives every law", [mutant.name for mutant in matrix.survivors()]),
        ("is a target that the mutant survives", [record.cell.id for record in matrix.survived_targets()]),
        ("is declared equivalent and is killed", [mutant.name for mutant in matrix.killed_equivalents()]),
        ("kills no mutant", matrix.laws_without_kills()),
        ("is no mutant's only killer, and its kept_because is empty", matrix.laws_without_reason()),
        ("has another first divergence than its target names", matrix.check_named_divergences()[1]),
        ("is an error of the harness", [f"{record.cell.id}: {record.cause}" for record in matrix.errors()]),
    )
    return ["\n".join(f"{name} {complaint}" for name in names) for complaint, names in kinds if names]


def summarize_kills(matrix: KillMatrix) -> str:
    """Return a line with the number of killed mutants and the number of targets with the expected first divergence."""
    real = [mutant for mutant in matrix.mutants if not mutant.equivalent]
    killed_count, messages = matrix.check_named_divergences()
    return (
        f"{len(real) - len(matrix.survivors())} of {len(real)} mutants killed by {len(matrix.laws)} laws "
        f"({len(matrix.records)} cells); the first divergence is right in {killed_count - len(messages)} of "
        f"{killed_count} targets"
    )


def index_mutant_records(records: Iterable[Record]) -> dict[str, Record]:
    """Return a mapping from cell ids to the records of cells on mutants; records of other engines are omitted."""
    return {record.cell.id: record for record in records if record.cell.engine.startswith(PATH)}
