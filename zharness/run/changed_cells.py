"""Choose the cells that reach the functions which a change touches; cells that are likely to fail come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path

from zharness.cell import is_cell_id
from zharness.errors import UsageError
from zharness.law_set import name_law_variant
from zharness.laws import DTYPES, find_laws
from zharness.run.candidate_cells import (
    add_further_cells,
    count_mentions,
    estimate_reach,
    find_mentions,
    find_named_laws,
    plan_recorded_cells,
)
from zharness.run.cell_planner import PlannedCell
from zharness.run.changed_functions import find_changed_functions, find_unmeasured_files, read_changed_lines
from zharness.run.covering import Pair, list_pairs
from zharness.run.engine_sources import MODULE_LEVEL
from zharness.run.plan import ClaimsLookup, Request, plan
from zharness.run.reach import CellReach, name_in_record, read_reach

MAX_NAMED = 5  # functions in a sentence
NAMED_LAW_FACTOR = 10  # for a cell whose law has a rare word of the changed lines in its name
FAILED_FACTOR = 0.25  # for a cell that failed when it was recorded: it detects a change only by failing differently
MIN_SECONDS = 0.05  # of a cell; shorter measured times are noise


@dataclass(frozen=True)
class ChangeSelection:
    """The commit from which a change of an engine's source starts, and the record of what each cell reaches.

    The change starts at the merge base of HEAD and ``base``.
    """

    base: str
    reach_file: Path


@dataclass(frozen=True)
class ChangedCells:
    """The cells to run for a change, in the order in which they run, and a sentence on what was selected."""

    cells: tuple[PlannedCell, ...]
    description: str


def select_changed_cells(request: Request, claims: ClaimsLookup, selection: ChangeSelection) -> ChangedCells:
    """Select the cells of ``request`` that reach a changed function of their engine. Raises UsageError."""
    reach = read_reach(selection.reach_file)
    recorded_names = frozenset().union(*(each.functions for each in reach.values()))
    matrix = plan(replace(request, depth=1), claims)
    is_of_single_cells = bool(request.patterns) and all(map(is_cell_id, request.patterns))
    recorded = [] if request.depth == 1 or is_of_single_cells else plan_recorded_cells(request, reach, matrix, claims)
    runnable = [cell for cell in (*matrix, *recorded) if not cell.unsupported_reason]
    cells, sentences = list[PlannedCell](), list[str]()
    for engine in dict.fromkeys(cell.cell.engine for cell in runnable):
        named = find_changed_functions(engine, selection.base, recorded_names)
        changed = frozenset(named.values())
        own = [cell for cell in runnable if cell.cell.engine == engine]
        if not any(name_in_record(cell.cell) in reach for cell in own):
            raise UsageError(
                f"{selection.reach_file} has none of the cells of {engine}; expected a record of this engine, by "
                "`zharness check --record-reach` with the same --engine, --stage, --world-size, --dtype and --model"
            )
        estimated = estimate_reach(own, reach)
        known = {**reach, **estimated}
        chosen = find_reaching_cells(own, known, changed)
        options = {
            name: option
            for stage in {cell.cell.stage for cell in own}
            for name, option in claims(engine, stage).engine_options.items()
        }
        lines = read_changed_lines(engine, selection.base)
        mentioned = find_mentions(options, "\n".join((*named, lines)))
        mentioned -= set(DTYPES) - {*request.dtypes, *request.array_dtypes}
        candidates, measured = (
            (chosen, known) if is_of_single_cells else add_further_cells(chosen, known, claims, mentioned)
        )
        named_laws = find_named_laws({law.name for law in find_laws(())}, lines)
        cells += order_cells(candidates, measured, mentioned, named_laws)
        unmeasured = frozenset(find_unmeasured_files(engine, selection.base))
        sentence = describe_selection(engine, selection.base, changed, own, chosen, known, unmeasured)
        added = len(candidates) - len(chosen)
        likely = sum(name_in_record(cell.cell) in estimated for cell in chosen)
        sentence += (
            f"; of these, cells that the record lacks, whose laws reach the change in most recorded cells: {likely}"
            if likely
            else ""
        )
        sentences.append(sentence + (f"; cells with another option or window: {added}" if added else ""))
    return ChangedCells(tuple(cells), "\n".join(sentences))


def describe_selection(
    engine: str,
    base: str,
    changed: Set[str],
    cells: Sequence[PlannedCell],
    reaching: Mapping[PlannedCell, frozenset[str]],
    reach: Mapping[str, CellReach],
    unmeasured: Set[str] = frozenset(),
) -> str:
    """Describe how many functions differ, how many of ``cells`` reach them, and which functions no cell reaches.

    ``unmeasured`` are the files that the change touches and that the record does not measure.
    """
    parts = [
        f"{engine}: functions and branches changed since {base}: {len(changed)}{name_some(changed)}",
        f"cells that reach them: {len(reaching)} of {len(cells)}",
    ]
    outside = find_unreached_modules(cells, reach, changed)
    if outside:
        parts.append(
            "changed files in which no cell reaches a function, or which the record does not measure, so that every "
            f"cell runs: {len(outside)}{name_some(outside)}"
        )
    if unmeasured:
        parts.append(
            "changed files that are not sources of the record, so that nothing says which cells they affect: "
            f"{len(unmeasured)}{name_some(unmeasured)}"
        )
    missed = changed - frozenset().union(*reaching.values())
    if missed:
        parts.append(f"functions that no cell reaches: {len(missed)}{name_some(missed)}")
    unknown = sum(name_in_record(cell.cell) not in reach for cell in cells)
    if unknown:
        parts.append(f"cells that are not in the record and do not run: {unknown}")
    return "; ".join(parts)


def name_some(functions: Set[str]) -> str:
    """Return the first of ``functions`` in parentheses, or nothing if there is none."""
    shown = ", ".join(sorted(functions)[:MAX_NAMED])
    return f" ({shown}{', ...' if len(functions) > MAX_NAMED else ''})" if functions else ""


def find_reaching_cells(
    cells: Sequence[PlannedCell], reach: Mapping[str, CellReach], changed: Set[str]
) -> dict[PlannedCell, frozenset[str]]:
    """Return each cell that reaches a function of ``changed``, with the changed functions that the cell reaches.

    A change of a file outside of its functions, such as of a constant or of the default of a dataclass, counts as
    reached by every cell that reaches any function of the file. If no cell reaches a function of the file, code in
    other files may still read the constant, so that the change counts as reached by every cell of the record.
    """
    modules = {name for name in changed if name.endswith(f":{MODULE_LEVEL}")}
    everywhere = find_unreached_modules(cells, reach, changed)
    reaching = {}
    for cell in cells:
        recorded = reach.get(name_in_record(cell.cell))
        if recorded is None:
            continue
        of_files = modules & list_modules(recorded.functions) if modules else frozenset[str]()
        found = recorded.functions & changed | of_files | everywhere
        if found:
            reaching[cell] = found
    return reaching


def find_unreached_modules(
    cells: Sequence[PlannedCell], reach: Mapping[str, CellReach], changed: Set[str]
) -> frozenset[str]:
    """Return the files of ``changed`` that differ outside of functions, and of which no cell reaches a function."""
    unreached = {name for name in changed if name.endswith(f":{MODULE_LEVEL}")}
    for name in map(name_in_record, (cell.cell for cell in cells)):
        if not unreached:
            break
        unreached -= list_modules(reach[name].functions) if name in reach else set()
    return frozenset(unreached)


def find_functions_of_modules(modules: Set[str], functions: Set[str]) -> frozenset[str]:
    """Return the ``functions`` of those files whose module level (``FILE:<module>``) is among ``modules``."""
    return frozenset(name for name in functions if f"{name.partition(':')[0]}:{MODULE_LEVEL}" in modules)


def list_modules(functions: Set[str]) -> frozenset[str]:
    """Return ``FILE:<module>``, the name of the lines outside of functions, for each file of ``functions``."""
    return frozenset(f"{name.partition(':')[0]}:{MODULE_LEVEL}" for name in functions)


def order_cells(
    reaching: Mapping[PlannedCell, frozenset[str]],
    reach: Mapping[str, CellReach],
    mentioned: Set[str] = frozenset(),
    named_laws: Set[str] = frozenset(),
) -> Iterator[PlannedCell]:
    """Yield the cells; each is the one among the remaining cells that is most likely to detect the change.

    Cells that have the most of the values ``mentioned``, which the change names, come first. Among these, a cell comes
    earlier if few cells reach the changed functions and branches that it reaches, if it has many pairs of its law
    variant, options, model and other values that no earlier cell has, and if it is short. A cell of ``named_laws`` is
    rated higher, and a cell that failed when it was recorded is rated lower. If a file differs outside of functions,
    every function of the file counts as changed; otherwise all cells that reach the file would be rated the same.
    """
    touched = {
        cell: functions | find_functions_of_modules(functions, reach[name_in_record(cell.cell)].functions)
        for cell, functions in reaching.items()
    }
    counts = Counter(name for functions in touched.values() for name in functions)
    missing: dict[PlannedCell, Set[Pair]] = {
        cell: list_pairs(cell.cell, name_law_variant(cell.cell.law, cell.cell.variant)) for cell in reaching
    }

    def rate(cell: PlannedCell) -> tuple[int, float, float]:
        """Return the negated rating of a cell: its mentioned values, its rate with its missing pairs, and without."""
        recorded = reach[name_in_record(cell.cell)]
        rate = sum(1 / counts[name] for name in touched[cell]) / max(MIN_SECONDS, recorded.seconds)
        rate *= NAMED_LAW_FACTOR if cell.cell.law in named_laws else 1
        rate *= FAILED_FACTOR if recorded.failed else 1
        return -count_mentions(cell.cell, mentioned), -rate * (1 + len(missing[cell])), -rate

    # A cell never has more missing pairs after a choice than before. So the first cell of the heap is the best cell if
    # its rating is still the same when it is computed again.
    heap = [(rate(cell), position, cell) for position, cell in enumerate(reaching)]
    heapify(heap)
    found = set[Pair]()
    while heap:
        rated, position, cell = heappop(heap)
        missing[cell] = missing[cell] - found
        if rate(cell) == rated:
            yield cell
            found |= missing[cell]
        else:
            heappush(heap, (rate(cell), position, cell))
