"""Choose cells that cover pairs of a law, or a variant of it, and a value of an axis, and pairs of values of two axes.

The axes are the engine's options, the stage, the accumulation window, the call of backward, the world size and the
dtype. allpairspy builds a covering array of settings, in which every compatible pair of values occurs; a pair of
options that allpairspy leaves out gets a setting of its own. Each law, or each variant of a law, then takes the
settings that cover the most pairs that no earlier cell covered. If a law or an engine does not support some values of a
setting, defaults replace these values. The cells of a law take the models of the law in turn. A pair of a model and
another value has to be covered if some cell of a law in a setting has this pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heapreplace
from itertools import chain, combinations, islice, pairwise, product
from typing import Any, cast

from allpairspy import AllPairs

from zharness.cell import Cell
from zharness.law_kit.setting import BackwardCall, Setting, SettingSupport
from zharness.law_set import name_law_variant
from zharness.run.configuration import cell_setting
from zharness.run.covering_axes import WINDOWS, Axes, CoveredLaw, Depth, Value

Pair = frozenset[object]  # two values, or the name of a law or law variant and a value

RelaxedSetting = tuple[str, int, str]  # the label of a setting, a world size and a dtype


def name_in_pairs(cell: Cell, depth: Depth) -> str:
    """Return the name of a cell's law in the pairs that are covered at ``depth``."""
    return cell.law if depth is Depth.LAWS else name_law_variant(cell.law, cell.variant)


def list_values(cell: Cell) -> tuple[Value, ...]:
    """Return the value of ``cell`` on each axis. A cell of the array has no model yet."""
    return _list_values(cell.engine_variant, cell.stage, cell.world_size, cell.dtype, cell.model)


@cache
def _list_values(engine_variant: str, stage: int, world_size: int, dtype: str, model: str) -> tuple[Value, ...]:
    """Return the values of a cell; cells with the same values share one cached tuple."""
    setting = cell_setting(engine_variant)
    return (
        *(("option", name) for name in setting.options),
        ("stage", stage),
        ("window", setting.window),
        ("call", setting.backward_call.value),
        ("world size", world_size),
        ("dtype", dtype),
        *((("model", model),) if model else ()),
    )


def list_pairs(cell: Cell, name: str) -> set[Pair]:
    """Return the pairs that ``cell`` covers: ``name``, the name of its law, with each value, and each two values."""
    return list_law_pairs(name, [cell]) | list_value_pairs(list_values(cell))


def list_law_pairs(name: str, cells: Sequence[Cell]) -> set[Pair]:
    """Return the pairs of ``name``, the name of a law, and each value of the law's ``cells``."""
    return {frozenset((name, value)) for value in set[Value]().union(*map(list_values, cells))}


@cache
def list_value_pairs(values: tuple[Value, ...]) -> frozenset[Pair]:
    """Return each two of ``values`` as a pair."""
    return frozenset(frozenset(pair) for pair in combinations(values, 2))


def build_settings(axes: Axes) -> list[Cell]:
    """Return cells without a law that cover every compatible pair of values."""
    options, count = ("", *axes.options), axes.joined_options
    others = (tuple(axes.claims_at), WINDOWS, tuple(BackwardCall), axes.world_sizes, axes.dtypes)

    def is_compatible(row: Sequence[Any]) -> bool:
        """Return whether the first values of a row can occur in one cell; later values are not chosen yet."""
        names, chosen = list_option_names(row[:count]), row[count:]
        # Refuse options in another order, and an empty column behind an option: another row has the same options.
        places = [options.index(name) for name in row[:count]]
        if any(first and first >= second for first, second in pairwise(places)):
            return False
        stages, sizes, dtypes = chosen[:1] or others[0], chosen[3:4] or axes.world_sizes, chosen[4:5] or axes.dtypes
        return any(axes.are_compatible(stage, names, *rest) for stage, *rest in product(stages, sizes, dtypes))

    rows = AllPairs((*(options,) * count, *others), filter_func=is_compatible)
    cells = [make_setting_cell(axes.engine, row[:count], row[count:]) for row in rows]
    covered = set().union(*(list_value_pairs(list_values(cell)) for cell in cells))
    # allpairspy gives up a pair if the filter refuses its first attempts to complete the row.
    for stage, *names in product(axes.claims_at, options, options):
        columns = [*[""] * (count - len(names)), *names]
        found = (
            (stage, WINDOWS[0], BackwardCall.ENGINE, size, dtype)
            for size, dtype in product(axes.world_sizes, axes.dtypes)
            if is_compatible((*columns, stage, WINDOWS[0], BackwardCall.ENGINE, size, dtype))
        )
        first = next(found, None)
        if first is not None:
            cell = make_setting_cell(axes.engine, columns, first)
            pairs = list_value_pairs(list_values(cell))
            if not pairs <= covered:
                cells.append(cell)
                covered |= pairs
    return cells


def list_option_names(columns: Sequence[str]) -> list[str]:
    """Return the options in the first columns of a row of the covering array, each of which is an option or ''."""
    return [name for name in columns if name]


def make_setting_cell(engine: str, option_columns: Sequence[str], values: Sequence[Any]) -> Cell:
    """Return the cell of a row of the covering array, with the options and the values of the other axes in the row.

    The cell has no law and no model.
    """
    stage, (steps, owner), call, world_size, dtype = values
    setting = Setting(tuple(list_option_names(option_columns)), steps, owner, call)
    return Cell("", engine, stage, world_size, dtype, "", "", setting.label)


@dataclass(frozen=True)
class Covering:
    """The chosen cells, the pairs that these cells and the matrix cover, and all pairs that some cell could cover.

    ``uncoverable`` has a sentence for each reason why no cell can have pairs that the engine claims.
    """

    cells: tuple[Cell, ...]
    covered: frozenset[Pair]
    coverable: frozenset[Pair]
    uncoverable: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe how many pairs of each kind are covered, as in ``option x window 50 of 50``, and which cannot be.

        The last lines are the sentences of ``uncoverable``.
        """
        covered, coverable = (Counter(map(pair_kind, pairs)) for pairs in (self.covered, self.coverable))
        kinds = ", ".join(f"{kind} {covered[kind]} of {count}" for kind, count in sorted(coverable.items()))
        sentence = f"{len(self.covered)} of {len(self.coverable)} pairs covered: {kinds}"
        return "\n  ".join((sentence, *self.uncoverable))


def pair_kind(pair: Pair) -> str:
    """Return the kind of a pair, as in ``law x option``; a pair with neither a law nor an option is ``other``."""
    axes = sorted(item[0] if isinstance(item, tuple) else "law" for item in pair)
    named = "law" in axes or "option" in axes
    return " x ".join(axes) if named else "other"


def cover_pairs(
    axes: Axes, laws: Sequence[CoveredLaw], matrix: Sequence[Cell], depth: Depth, is_whole: bool
) -> Covering:
    """Choose cells that cover pairs, in addition to the cells of ``matrix``.

    The cells cover each pair of one of ``laws`` and a value. If ``is_whole``, which means that ``laws`` are all laws,
    they also cover each pair of values. At Depth.SETTINGS, each of ``laws`` runs every setting of the array, so that
    the law has a cell with each pair of values.
    """
    settings = [(cell, list(relax_setting(axes, cell))) for cell in build_settings(axes)]
    candidates = {law.name: list(project_settings(axes, law, settings)) for law in laws}
    covered: set[Pair] = set().union(*(list_pairs(cell, name_in_pairs(cell, depth)) for cell in matrix))
    # One cell of any law for each combination of values is enough to cover pairs of values.
    distinct = {list_values(cell): cell for cell in chain.from_iterable(reversed(candidates.values()))}
    offered = covered.union(
        *(list_law_pairs(law.name, candidates[law.name]) for law in laws),
        *(list_value_pairs(values) for values in distinct),
    )
    if depth is Depth.SETTINGS:
        return Covering(tuple(chain.from_iterable(candidates.values())), frozenset(offered), frozenset(offered))
    chosen = dict[Cell, None]()
    for number, law in enumerate(laws):
        met = {value for value in axes.values if frozenset((law.name, value)) in covered}
        for cell in choose_for_law(candidates[law.name], met, first=number):
            chosen[cell] = None
            covered |= list_pairs(cell, law.name)
    if is_whole:
        placed = list(find_missing_cells(axes, laws, offered))
        offered = offered.union(*(list_pairs(cell, name_in_pairs(cell, depth)) for cell in placed))
        for cell in choose_for_pairs([*distinct.values(), *placed], covered):
            chosen[cell] = None
            covered |= list_pairs(cell, name_in_pairs(cell, depth))
    if is_whole and depth is Depth.LAW_VARIANTS:
        for cell in find_missing_triples(axes, laws, (*matrix, *chosen)):
            chosen[cell], pairs = None, list_pairs(cell, name_in_pairs(cell, depth))
            covered, offered = covered | pairs, offered | pairs
    return Covering(tuple(chosen), frozenset(covered), frozenset(offered))


def choose_for_law(cells: Sequence[Cell], met: Set[Value], first: int) -> Iterator[Cell]:
    """Yield repeatedly the cell of a law with the most missing values, until no cell has a missing value.

    ``cells`` are all cells of the law; a value is missing if it is neither in ``met`` nor in a yielded cell. Among
    equal cells, the first one from position ``first`` on is taken, so that laws take different settings.
    """
    bits = dict[Value, int]()
    masks = [sum(1 << bits.setdefault(value, len(bits)) for value in list_values(cell)) for cell in cells]
    missing = (1 << len(bits)) - 1
    for value in met & bits.keys():
        missing &= ~(1 << bits[value])
    order = [(first + position) % len(cells) for position in range(len(cells))]
    while missing and cells:
        best = max(order, key=lambda position: (masks[position] & missing).bit_count())
        if not masks[best] & missing:
            return
        missing &= ~masks[best]
        yield cells[best]


def choose_for_pairs(cells: Sequence[Cell], covered: Set[Pair]) -> Iterator[Cell]:
    """Yield repeatedly the cell with the most pairs of values that are not covered, until no cell has such a pair."""
    missing = [list_value_pairs(list_values(cell)) - covered for cell in cells]
    # A cell never has more missing pairs after a choice than before. So the first cell of the heap is the best cell if
    # its count is still the same when it is computed again.
    heap = [(-len(pairs), position) for position, pairs in enumerate(missing)]
    heapify(heap)
    found = set[Pair]()
    while heap and heap[0][0]:
        count, position = heap[0]
        left = missing[position] - found
        if count == -len(left):
            yield cells[position]
            found |= left
            left = frozenset()
        heapreplace(heap, (-len(left), position))


def find_missing_cells(axes: Axes, laws: Sequence[CoveredLaw], offered: Set[Pair]) -> Iterator[Cell]:
    """Yield a runnable cell for each two values that can occur in one cell and that are not in ``offered``.

    The array lacks such a pair if allpairspy gave it up, or if each law replaced one of the values by a default.
    """
    # The laws that support every window and call of backward come first, because other laws support few values.
    ordered = sorted(laws, key=lambda law: law.law.setting_support is not SettingSupport.WINDOWS_AND_CALLS)
    for values in combinations(axes.values, 2):
        is_pair = values[0][0] != values[1][0] or values[0][0] == "option"
        if is_pair and frozenset(values) not in offered:
            stages = [value for axis, value in values if axis == "stage"] or axes.claims_at
            cells = ((law, axes.place_values(law, cast(int, stage), values)) for law, stage in product(ordered, stages))
            found = next((cell for law, cell in cells if not axes.find_refusal(law.law, cell)), None)
            if found is not None:
                yield found


def find_missing_triples(axes: Axes, laws: Sequence[CoveredLaw], chosen: Sequence[Cell]) -> Iterator[Cell]:
    """Yield, for each law that covers triples, runnable cells for the triples that no ``chosen`` cell of the law has.

    A triple is an option, a world size and a dtype. The cells have one variant of each law, and take the stages in
    turn.
    """
    stages = tuple(axes.claims_at)
    for law in {law.law.name: law for law in reversed(laws) if law.law.covers_triples}.values():
        cells = [(cell, cell_setting(cell.engine_variant)) for cell in chosen if cell.law == law.law.name]
        met = {(option, cell.world_size, cell.dtype) for cell, setting in cells for option in setting.options}
        for number, triple in enumerate(product(axes.options, axes.world_sizes, axes.dtypes)):
            if triple in met:
                continue
            values, first = tuple(zip(("option", "world size", "dtype"), triple, strict=True)), number % len(stages)
            placed = (axes.place_values(law, stage, values) for stage in (*stages[first:], *stages[:first]))
            yield from islice((cell for cell in placed if not axes.find_refusal(law.law, cell)), 1)


def project_settings(
    axes: Axes, covered: CoveredLaw, settings: Sequence[tuple[Cell, Sequence[RelaxedSetting]]]
) -> Iterator[Cell]:
    """Yield a runnable cell of ``covered`` for each setting; defaults replace values that the law does not support.

    Each item of ``settings`` has a setting and its relaxed settings, which are tried in their order.
    """
    law, subjects, found = covered.law, covered.subjects, set[Cell]()
    for number, (setting, relaxed_settings) in enumerate(settings):
        first = number % len(subjects)
        cells = (
            Cell(law.name, axes.engine, setting.stage, world_size, dtype, model, variant, label)
            for label, world_size, dtype in relaxed_settings
            if axes.may_run(law, setting.stage, label, world_size, dtype)
            for model, variant in (*subjects[first:], *subjects[:first])
        )
        runnable = next((cell for cell in cells if not axes.find_refusal(law, cell)), None)
        if runnable is not None and runnable not in found:
            found.add(runnable)
            yield runnable


def relax_setting(axes: Axes, cell: Cell) -> Iterator[RelaxedSetting]:
    """Yield the values of ``cell``, then values with more and more defaults; options are given up last."""
    setting = cell_setting(cell.engine_variant)
    calls = dict.fromkeys((setting.backward_call, BackwardCall.ENGINE))
    windows = dict.fromkeys(((setting.accumulation_steps, setting.owner), WINDOWS[0]))
    lengths = range(len(setting.options), -1, -1)
    options = chain.from_iterable(combinations(setting.options, length) for length in lengths)
    sizes = dict.fromkeys((cell.world_size, axes.world_sizes[0]))
    dtypes = dict.fromkeys((cell.dtype, *axes.dtypes))
    for names, size, dtype, (steps, owner), call in product(options, sizes, dtypes, windows, calls):
        yield Setting(names, steps, owner, call).label, size, dtype
