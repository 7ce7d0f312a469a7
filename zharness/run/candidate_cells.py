"""Find further cells that may reach a change, beside the cells that both the matrix and the record of reach have.

Further cells are cells that only the record has, cells that only the matrix has, and cells with one more option or
another window.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any

from zharness.cell import Cell
from zharness.engines import EngineOption
from zharness.engines.registry import split_release
from zharness.law_kit.setting import Setting
from zharness.laws import DTYPES, find_laws
from zharness.run.cell_planner import CellPlanner, PlannedCell
from zharness.run.configuration import cell_setting, is_config_file
from zharness.run.plan import ClaimsLookup, Request
from zharness.run.reach import CellReach, name_in_record

# The number of cells to which the cells of a change are filled up. At 374 cells in 183 processor seconds
# (scripts/reverted_fixes.py, docs/your-engine.md), two idle cores run about 500 cells in two minutes, so that there is
# no time for cells that the record lacks.
ENOUGH_CELLS = 500
WINDOWS = ("2_by_caller", "2_by_engine")  # accumulation windows that further cells get
MIN_KEY_LENGTH = 8  # the length of a key that identifies an option in source; shorter keys are words such as "enabled"
MIN_WORD_LENGTH = 4  # the length of a word that identifies a law
MAX_LAWS_OF_WORD = 3  # a word such as "grad" or "step", which more laws have in their names, identifies no law
COMMON_KEYS = frozenset({"zero_optimization"})
ACCUMULATION = "accumulation"  # stands for every window of several micro-batches
MENTIONS = {
    "bf16": re.compile("bf16|bfloat16", re.IGNORECASE),
    "fp16": re.compile("fp16|(?<!b)float16", re.IGNORECASE),
    ACCUMULATION: re.compile("gradient_accumulation|micro_step", re.IGNORECASE),
}


def plan_recorded_cells(
    request: Request, reach: Mapping[str, CellReach], matrix: Sequence[PlannedCell], claims: ClaimsLookup
) -> Iterator[PlannedCell]:
    """Yield the runnable cells of ``reach`` that ``request`` selects and its ``matrix`` lacks.

    The function takes the cells of the covering array from the record, because planning a covering array would take
    longer than running the cells of a small change. Cells that this version of zharness does not have are left out.
    """
    known = {cell.cell for cell in matrix}
    laws = {law.name: law for law in find_laws(request.patterns)}
    for engine in request.engines:
        planners = {
            cell.cell.stage: CellPlanner(claims(engine, cell.cell.stage))
            for cell in matrix
            if cell.cell.engine == engine
        }
        for name in reach:
            recorded = Cell.parse(name)
            cell = replace(recorded, engine=engine)
            law = laws.get(cell.law)
            is_selected = (
                recorded.engine == split_release(engine)[0]
                and cell.stage in planners
                and cell.world_size in (*request.world_sizes, *request.array_world_sizes)
                and cell.dtype in (*request.dtypes, *request.array_dtypes)
                and cell.mesh == request.mesh
                and (not request.models or cell.model in request.models)
            )
            if cell in known or law is None or not is_selected:
                continue
            if cell.model in law.models and cell.variant in law.workload_variants:
                planned = planners[cell.stage].plan_cell(law, cell)
                if not planned.unsupported_reason:
                    yield planned


def estimate_reach(cells: Sequence[PlannedCell], reach: Mapping[str, CellReach]) -> dict[str, CellReach]:
    """Estimate the reach of those ``cells`` that the record ``reach`` lacks; return it by ``name_in_record``.

    A record lacks cells if it is of a part of a run, or older than a model or a variant of a law. The estimate for a
    cell is the functions that at least half of the recorded cells of the same law and stage reach. A cell is left out
    if the record has no cell of its law and stage.
    """
    recorded = dict[tuple[str, int], list[CellReach]]()
    for name, each in reach.items():
        cell = Cell.parse(name)
        recorded.setdefault((cell.law, cell.stage), []).append(each)
    lacking = {name_in_record(planned.cell): planned.cell for planned in cells}
    similar = {name: recorded.get((cell.law, cell.stage)) for name, cell in lacking.items() if name not in reach}
    return {name: average_reach(tuple(group)) for name, group in similar.items() if group}


@cache
def average_reach(group: tuple[CellReach, ...]) -> CellReach:
    """Return the functions that at least half of ``group`` reach, the mean of their seconds, and a verdict.

    The verdict is a failure only if all of ``group`` failed.
    """
    counts = Counter(name for each in group for name in each.functions)
    functions = frozenset(name for name, count in counts.items() if 2 * count >= len(group))
    verdict = next((each.verdict for each in group if not each.failed), group[0].verdict)
    return CellReach(functions, sum(each.seconds for each in group) / len(group), verdict)


def plan_further_cells(
    reaching: Sequence[PlannedCell], claims: ClaimsLookup, mentioned: Set[str] = frozenset()
) -> Iterator[tuple[PlannedCell, PlannedCell]]:
    """Yield pairs of a cell of ``reaching`` and a runnable copy of it with another window or dtype or one more option.

    A record has each law under each option, but not each variant and model of the law, and not each option in each
    window and stage. The function goes through options, dtypes and windows, and yields for each of them the copies of
    all cells that support it: first the options and dtypes that are ``mentioned``, then the windows, then the other
    options. Only cells without options get an option or a dtype.
    """
    claimed = {
        (base.cell.engine, base.cell.stage): claims(base.cell.engine, base.cell.stage)
        for base in reaching
        if not is_config_file(base.cell.engine_variant)
    }
    options = dict.fromkeys(option for capabilities in claimed.values() for option in capabilities.engine_options)
    planners = {key: CellPlanner(capabilities) for key, capabilities in claimed.items()}
    laws = {name: find_laws((name,))[0] for name in {base.cell.law for base in reaching}}
    first = [name for name in (*DTYPES, *options) if name in mentioned]
    for name in dict.fromkeys((*first, *WINDOWS, *options)):
        for base in reaching:
            key = (base.cell.engine, base.cell.stage)
            extended = extend_cell(base.cell, name)
            known = (*WINDOWS, *DTYPES, *claimed[key].engine_options) if key in claimed else ()
            if extended is None or name not in known:
                continue
            planned = planners[key].plan_cell(laws[base.cell.law], extended)
            if not planned.unsupported_reason:
                yield base, planned


def extend_cell(cell: Cell, name: str) -> Cell | None:
    """Return ``cell`` with the window, dtype or option ``name``, or None if the cell has ``name`` already.

    A cell with options or a window gets no dtype or option.
    """
    if name in WINDOWS:
        return set_window(cell, name)
    if cell.engine_variant or cell.dtype == name:
        return None
    return replace(cell, dtype=name) if name in DTYPES else replace(cell, engine_variant=name)


def set_window(cell: Cell, window: str) -> Cell | None:
    """Return ``cell`` with an accumulation window, such as ``2_by_caller``, or None if it has that window already.

    The returned cell calls the engine's backward, because not every window supports the other calls of backward.
    """
    setting = cell_setting(cell.engine_variant)
    if setting.window == window:
        return None
    return replace(cell, engine_variant=replace(Setting.parse(window), options=setting.options).label)


def find_mentions(options: Mapping[str, EngineOption], text: str) -> frozenset[str]:
    """Return the values of axes that ``text``, the branches and lines of a change, mentions.

    These are the names of the ``options`` that have a key in ``text``, the dtypes in ``text``, and ACCUMULATION if
    ``text`` mentions accumulation.
    """
    mentioned = {
        name
        for name, option in options.items()
        if any(key.removeprefix("stage3_") in text for key in list_keys(option.options))
    }
    return frozenset(mentioned | {value for value, words in MENTIONS.items() if words.search(text)})


def find_named_laws(laws: Set[str], text: str) -> frozenset[str]:
    """Return the ``laws`` whose names share with ``text``, the changed lines, a word that few laws have.

    ``dtype`` in a line stands for ``precision.buffers_keep_dtype``. Words are compared without a final s.
    """
    words_by_law = {law: split_words(law.partition(".")[2]) for law in laws}
    counts = Counter(word for words in words_by_law.values() for word in words)
    rare = {word for word in split_words(text) if len(word) >= MIN_WORD_LENGTH and counts[word] <= MAX_LAWS_OF_WORD}
    return frozenset(law for law, words in words_by_law.items() if words & rare)


def split_words(text: str) -> set[str]:
    """Return the words of identifiers in ``text``, in lower case and without a final s."""
    return {word.removesuffix("s") for word in re.findall("[a-z0-9]+", text.lower())}


def list_keys(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of an option's sections that are long enough to identify it in source."""
    for key, value in options.items():
        if len(key) >= MIN_KEY_LENGTH and key not in COMMON_KEYS:
            yield key
        if isinstance(value, Mapping):
            yield from list_keys(value)


def count_mentions(cell: Cell, mentioned: Set[str]) -> int:
    """Return how many of the values ``mentioned``, as ``find_mentions`` returns them, ``cell`` has."""
    setting = cell_setting(cell.engine_variant)
    window = {ACCUMULATION} if setting.accumulation_steps > 1 else set[str]()
    return len(mentioned & {*setting.options, cell.dtype, *window})


def add_further_cells(
    reaching: Mapping[PlannedCell, frozenset[str]],
    reach: Mapping[str, CellReach],
    claims: ClaimsLookup,
    mentioned: Set[str] = frozenset(),
) -> tuple[dict[PlannedCell, frozenset[str]], dict[str, CellReach]]:
    """Return ``reaching`` and ``reach`` with further cells, up to ENOUGH_CELLS cells.

    The reach of a further cell is assumed to be that of the cell from which it is made. Cells that failed when they
    were recorded do not count towards ENOUGH_CELLS, and no further cell is made from them.
    """
    cells, measured = dict(reaching), dict(reach)
    bases = [cell for cell in reaching if not reach[name_in_record(cell.cell)].failed]
    missing = ENOUGH_CELLS - len(bases)
    if missing <= 0:
        return cells, measured
    for base, planned in plan_further_cells(bases, claims, mentioned):
        name = name_in_record(planned.cell)
        if name not in measured:
            cells[planned], measured[name] = reaching[base], reach[name_in_record(base.cell)]
            missing -= 1
        if not missing:
            break
    return cells, measured
