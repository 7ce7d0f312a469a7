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

from zharness.parity.comparison import Comparison, MismatchTensors, TensorLocation
from zharness.parity.ulps import CLASS_LABELS, count_ulp_classes

HEAT_MAP_ROWS, HEAT_MAP_COLUMNS = 20, 48  # blocks of a heat map
MAX_LAYERS = 48
LAYER_DIGITS, HEAT_MAP_DIGITS = 3, 2  # digits of a layer's ratio, and of one in a heat map
SHORT_INTEGER_LIMIT = 1e6  # an integer below it is no longer than a float
MAX_FOLLOWING_ELEMENTS = 1 << 24  # elements compared beyond the first mismatch, for the layers: a second or two

JsonNumber = float | str


class HeatMap(TypedDict):
    """The largest error over its bound in each of ``rows`` x ``columns`` blocks of a parameter seen as a matrix.

    A parameter of one dimension is one row; of more, its first dimension are the rows. ``block`` is how many rows and
    columns of the matrix a block has; the last ones may have fewer.
    """

    rows: int
    columns: int
    block: list[int]
    values: list[list[JsonNumber]]


class ShardRange(TypedDict):
    """Elements ``start`` to ``stop`` (flat) lie on ``rank``."""

    rank: int
    start: int
    stop: int


class UlpHistograms(TypedDict):
    """How many elements lie in each class of ``edges``, in units of the last place of the engine's dtype, from float64.

    The oracle is the float64 number that the comparison is held against; where a law asks for the baseline's own bits,
    they are. ``baseline`` is empty where the judge has no numbers of plain torch.
    """

    edges: list[str]
    engine: list[int]
    baseline: list[int]


class LayerRatio(TypedDict):
    """The largest error over its bound in one parameter."""

    name: str
    ratio: JsonNumber


class TrainingCurve(TypedDict):
    """One number for each step, of the engine and of the plain model, which was trained on its own."""

    engine: list[JsonNumber]
    baseline: list[JsonNumber]


class MismatchReport(TypedDict):
    """All of it, of the first comparison that went wrong; null where there is nothing to show.

    ``layers`` are parameters in order of depth, by the comparisons of the same step and part; of many, the worst of
    each few neighbours. ``curves`` are those of "loss" and "norm" where the check trained several steps.
    """

    parameter: str
    part: str
    step: int
    shape: list[int]
    heat: HeatMap | None
    shards: list[ShardRange] | None
    ulps: UlpHistograms | None
    layers: list[LayerRatio] | None
    curves: Mapping[str, TrainingCurve]


def build_mismatch_report(
    comparisons: Sequence[Comparison],
    remaining: Iterator[Comparison],
    parameter_names: Sequence[str],
    curves: Mapping[str, TrainingCurve],
) -> MismatchReport | None:
    """What there is to show of ``seen``, of which the last is a mismatch; None where it kept no numbers.

    ``coming`` are the comparisons after it, which are taken as long as they tell of the same step and part; ``names``
    the model's parameters in order of depth.
    """
    last = comparisons[-1]
    if last.mismatch is None or last.location is None or last.mismatch_tensors is None:
        return None
    return {
        "parameter": last.mismatch.parameter,
        "part": last.mismatch.part.value,
        "step": last.mismatch.step,
        "shape": list(last.mismatch_tensors.ratio.shape),
        "heat": build_heat_map(last.mismatch_tensors.ratio),
        "shards": [{"rank": p.rank, "start": p.start, "stop": p.stop} for p in last.location.pieces] or None,
        "ulps": build_ulp_histograms(last.mismatch_tensors),
        "layers": worst_layer_ratios(
            chain(comparisons_before(comparisons, last.location), comparisons_after(remaining, last.location)),
            parameter_names,
        ),
        "curves": curves,
    }


def build_heat_map(ratio: Tensor) -> HeatMap:
    """``ratio`` in blocks."""
    matrix = ratio.reshape(ratio.shape[0], -1) if ratio.dim() > 1 else ratio.reshape(1, -1)
    height, width = (
        math.ceil(size / most) for size, most in zip(matrix.shape, (HEAT_MAP_ROWS, HEAT_MAP_COLUMNS), strict=True)
    )
    rows, columns = math.ceil(matrix.shape[0] / height), math.ceil(matrix.shape[1] / width)
    margin = (0, columns * width - matrix.shape[1], 0, rows * height - matrix.shape[0])
    blocks = torch.nn.functional.pad(matrix, margin).view(rows, height, columns, width).amax((1, 3))
    values = [[round_ratio(value, HEAT_MAP_DIGITS) for value in row] for row in blocks.tolist()]
    return {"rows": rows, "columns": columns, "block": [height, width], "values": values}


def build_ulp_histograms(tensors: MismatchTensors) -> UlpHistograms:
    """The distances of the engine's numbers and of plain torch's."""
    held, plain = tensors.actual, list[int]()
    # From a state that is wrong in kind torch's optimizer cannot step; the engine's numbers can be shown all the same.
    with suppress(Exception):
        plain = (
            []
            if tensors.compute_plain is None
            else count_ulp_classes(tensors.expected, tensors.compute_plain().to(held.dtype))
        )
    return {"edges": CLASS_LABELS, "engine": count_ulp_classes(tensors.expected, held), "baseline": plain}


def comparisons_before(comparisons: Sequence[Comparison], location: TensorLocation) -> Iterable[Comparison]:
    """The comparisons of the same step and part that led to the last one, and it."""
    return takewhile(lambda found: is_same_step_and_part(found, location), reversed(comparisons))


def comparisons_after(remaining: Iterator[Comparison], location: TensorLocation) -> Iterator[Comparison]:
    """Those that follow it, up to LOOKED_AT elements."""
    left = MAX_FOLLOWING_ELEMENTS
    # Once a number is wrong the engine's next ones may be of any kind: what the judge makes of them is no news.
    with suppress(Exception):
        for found in remaining:
            left -= found.elements
            if left < 0 or not is_same_step_and_part(found, location):
                return
            yield found


def is_same_step_and_part(comparison: Comparison, location: TensorLocation) -> bool:
    """Whether a comparison tells of the same step and part."""
    return comparison.location is not None and (comparison.location.step, comparison.location.part) == (
        location.step,
        location.part,
    )


def worst_layer_ratios(comparisons: Iterable[Comparison], parameter_names: Sequence[str]) -> list[LayerRatio] | None:
    """The worst ratio of each parameter, weights and optimizer state together; None where there is none."""
    known, worst = set(parameter_names), dict[str, float]()
    for comparison in comparisons:
        for named, ratio in ratios_by_parameter(comparison).items():
            name = named if named in known else named.rpartition("/")[0]
            worst[name] = max(ratio, worst.get(name, 0.0))
    compared = [name for name in parameter_names if name in worst]
    several = math.ceil(len(compared) / MAX_LAYERS)
    groups = [compared[start : start + several] for start in range(0, len(compared), several or 1)]
    chosen = [max(group, key=worst.__getitem__) for group in groups]
    return [{"name": name, "ratio": round_ratio(worst[name], LAYER_DIGITS)} for name in chosen] or None


def ratios_by_parameter(comparison: Comparison) -> Mapping[str, float]:
    """The worst ratio of each parameter that was compared, usually one."""
    if comparison.mismatch_tensors is not None and comparison.mismatch_tensors.ratios_by_parameter:
        return comparison.mismatch_tensors.ratios_by_parameter
    return {comparison.location.name: comparison.ratio} if comparison.location else {}


def round_ratio(ratio: float, digits: int) -> JsonNumber:
    """An error over its bound; one that is beyond it is never rounded to it."""
    rounded = round_for_json(ratio, digits)
    return 1 + 10.0 ** (1 - digits) if ratio > 1 and rounded == 1 else rounded


def round_for_json(value: float, digits: int) -> JsonNumber:
    """``value`` in so many digits, as JSON can hold it and in few characters."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < SHORT_INTEGER_LIMIT else rounded
