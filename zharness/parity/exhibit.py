"""What a failing cell shows besides its verdict: where in the tensor, how far off, in whose shard, in which layers.

Plain data, as it stands in a record's JSON: about 10 KB at most. A number that JSON does not have is a string.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, takewhile
from typing import TypedDict

import torch
from torch import Tensor

from zharness.parity.facts import Comparison, Place, Witness
from zharness.parity.ulps import EDGES, counted

ROWS, COLUMNS = 20, 48  # blocks of a heat map
LAYERS = 48
FINE, COARSE = 3, 2  # digits of a layer's ratio, and of one in a heat map
SHORT = 1e6  # an integer below it is no longer than a float
LOOKED_AT = 1 << 24  # elements compared beyond the first mismatch, for the layers: a second or two

Number = float | str


class Heat(TypedDict):
    """The largest error over its bound in each of ``rows`` x ``columns`` blocks of a parameter seen as a matrix.

    A parameter of one dimension is one row; of more, its first dimension are the rows. ``block`` is how many rows and
    columns of the matrix a block has; the last ones may have fewer.
    """

    rows: int
    columns: int
    block: list[int]
    values: list[list[Number]]


class Shard(TypedDict):
    """Elements ``start`` to ``stop`` (flat) lie on ``rank``."""

    rank: int
    start: int
    stop: int


class Ulps(TypedDict):
    """How many elements lie in each class of ``edges``, in units of the last place of the engine's dtype, from float64.

    The oracle is the float64 number that the comparison is held against; where a law asks for the baseline's own bits,
    they are. ``baseline`` is empty where the judge has no numbers of plain torch.
    """

    edges: list[str]
    engine: list[int]
    baseline: list[int]


class Layer(TypedDict):
    """The largest error over its bound in one parameter."""

    name: str
    ratio: Number


class Curve(TypedDict):
    """One number for each step, of the engine and of the plain model, which was trained on its own."""

    engine: list[Number]
    baseline: list[Number]


class Exhibit(TypedDict):
    """All of it, of the first comparison that went wrong; null where there is nothing to show.

    ``layers`` are parameters in order of depth, by the comparisons of the same step and part; of many, the worst of
    each few neighbours. ``curves`` are those of "loss" and "norm" where the check trained several steps.
    """

    parameter: str
    part: str
    step: int
    shape: list[int]
    heat: Heat | None
    shards: list[Shard] | None
    ulps: Ulps | None
    layers: list[Layer] | None
    curves: Mapping[str, Curve]


def exhibit(
    seen: Sequence[Comparison], coming: Iterator[Comparison], names: Sequence[str], curves: Mapping[str, Curve]
) -> Exhibit | None:
    """What there is to show of ``seen``, of which the last is a mismatch; None where it kept no numbers.

    ``coming`` are the comparisons after it, which are taken as long as they tell of the same step and part; ``names``
    the model's parameters in order of depth.
    """
    last = seen[-1]
    if last.mismatch is None or last.place is None or last.witness is None:
        return None
    return {
        "parameter": last.mismatch.parameter,
        "part": last.mismatch.part.value,
        "step": last.mismatch.step,
        "shape": list(last.witness.ratio.shape),
        "heat": heat(last.witness.ratio),
        "shards": [{"rank": p.rank, "start": p.start, "stop": p.stop} for p in last.place.pieces] or None,
        "ulps": ulps(last.witness),
        "layers": layers(chain(before(seen, last.place), after(coming, last.place)), names),
        "curves": curves,
    }


def heat(ratio: Tensor) -> Heat:
    """``ratio`` in blocks."""
    matrix = ratio.reshape(ratio.shape[0], -1) if ratio.dim() > 1 else ratio.reshape(1, -1)
    height, width = (math.ceil(size / most) for size, most in zip(matrix.shape, (ROWS, COLUMNS), strict=True))
    rows, columns = math.ceil(matrix.shape[0] / height), math.ceil(matrix.shape[1] / width)
    margin = (0, columns * width - matrix.shape[1], 0, rows * height - matrix.shape[0])
    blocks = torch.nn.functional.pad(matrix, margin).view(rows, height, columns, width).amax((1, 3))
    values = [[over(value, COARSE) for value in row] for row in blocks.tolist()]
    return {"rows": rows, "columns": columns, "block": [height, width], "values": values}


def ulps(witness: Witness) -> Ulps:
    """The distances of the engine's numbers and of plain torch's."""
    held, plain = witness.actual, list[int]()
    # From a state that is wrong in kind torch's optimizer cannot step; the engine's numbers can be shown all the same.
    with suppress(Exception):
        plain = [] if witness.plain is None else counted(witness.expected, witness.plain().to(held.dtype))
    return {"edges": EDGES, "engine": counted(witness.expected, held), "baseline": plain}


def before(seen: Sequence[Comparison], place: Place) -> Iterable[Comparison]:
    """The comparisons of the same step and part that led to the last one, and it."""
    return takewhile(lambda found: together(found, place), reversed(seen))


def after(coming: Iterator[Comparison], place: Place) -> Iterator[Comparison]:
    """Those that follow it, up to LOOKED_AT elements."""
    left = LOOKED_AT
    # Once a number is wrong the engine's next ones may be of any kind: what the judge makes of them is no news.
    with suppress(Exception):
        for found in coming:
            left -= found.elements
            if left < 0 or not together(found, place):
                return
            yield found


def together(found: Comparison, place: Place) -> bool:
    """Whether a comparison tells of the same step and part."""
    return found.place is not None and (found.place.step, found.place.part) == (place.step, place.part)


def layers(found: Iterable[Comparison], names: Sequence[str]) -> list[Layer] | None:
    """The worst ratio of each parameter, weights and optimizer state together; None where there is none."""
    known, worst = set(names), dict[str, float]()
    for comparison in found:
        for named, ratio in by_name(comparison).items():
            name = named if named in known else named.rpartition("/")[0]
            worst[name] = max(ratio, worst.get(name, 0.0))
    compared = [name for name in names if name in worst]
    several = math.ceil(len(compared) / LAYERS)
    groups = [compared[start : start + several] for start in range(0, len(compared), several or 1)]
    chosen = [max(group, key=worst.__getitem__) for group in groups]
    return [{"name": name, "ratio": over(worst[name], FINE)} for name in chosen] or None


def by_name(comparison: Comparison) -> Mapping[str, float]:
    """The worst ratio of each parameter that was compared, usually one."""
    if comparison.witness is not None and comparison.witness.group:
        return comparison.witness.group
    return {comparison.place.name: comparison.ratio} if comparison.place else {}


def over(ratio: float, digits: int) -> Number:
    """An error over its bound; one that is beyond it is never rounded to it."""
    rounded = number(ratio, digits)
    return 1 + 10.0 ** (1 - digits) if ratio > 1 and rounded == 1 else rounded


def number(value: float, digits: int) -> Number:
    """``value`` in so many digits, as JSON can hold it and in few characters."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < SHORT else rounded
