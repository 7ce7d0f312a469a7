"""Describe a mismatch for a record's JSON: heat map, shards, ULP histograms, layers and training curves.

A report is plain data of at most about 10 KB. A number that JSON cannot hold is written as a string.
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

HEAT_MAP_ROWS, HEAT_MAP_COLUMNS = 20, 48  # largest number of blocks in each direction
MAX_LAYERS = 48
LAYER_DIGITS, HEAT_MAP_DIGITS = 3, 2  # significant digits of ratios
SHORT_INTEGER_LIMIT = 1e6  # integers below it are written without a decimal point
MAX_FOLLOWING_ELEMENTS = 1 << 24  # limit on elements compared after the mismatch for ``layers``: 1 or 2 s

JsonNumber = float | str


class HeatMap(TypedDict):
    """The largest error / bound in each of ``rows`` x ``columns`` blocks of a parameter viewed as a matrix.

    A one-dimensional parameter is one row; otherwise the first dimension gives the rows. ``block`` is the number of
    matrix rows and columns in a block; the last blocks may be smaller.
    """

    rows: int
    columns: int
    block: list[int]
    values: list[list[JsonNumber]]


class ShardRange(TypedDict):
    """The range of flat elements, from ``start`` up to but without ``stop``, that lies on ``rank``."""

    rank: int
    start: int
    stop: int


class UlpHistograms(TypedDict):
    """The number of elements in each class of ``edges``, by distance from the expected float64 number in ULPs of the
    engine's dtype.

    If a law demands the baseline's own bits, the expected number is the baseline's. ``baseline`` is empty if the judge
    has no numbers of plain torch.
    """

    edges: list[str]
    engine: list[int]
    baseline: list[int]


class LayerRatio(TypedDict):
    """The largest error / bound in one parameter."""

    name: str
    ratio: JsonNumber


class TrainingCurve(TypedDict):
    """One number per step for the engine, and for the plain model trained separately."""

    engine: list[JsonNumber]
    baseline: list[JsonNumber]


class MismatchReport(TypedDict):
    """The report of the first comparison that failed; a field is null if there is nothing to show.

    ``layers`` lists parameters by depth, from the comparisons of the same step and part; of more than ``MAX_LAYERS``
    parameters it keeps only the worst of each group of neighbours. ``curves`` has "loss" and "norm" if the law trained
    several steps.
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
    """Build the report of the last comparison of ``comparisons``; None unless it is a mismatch that kept its tensors.

    ``remaining`` are the comparisons after it, which are consumed as long as they belong to the same step and part.
    ``parameter_names`` are the model's parameters in order of depth.
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
    """Reduce ``ratio`` to the largest value of each block."""
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
    """Count the engine's and plain torch's elements by their distance from the expected numbers."""
    actual, plain = tensors.actual, list[int]()
    # Plain torch cannot step from a state of a wrong shape or type; the engine's histogram is still useful.
    with suppress(Exception):
        plain = (
            []
            if tensors.compute_plain is None
            else count_ulp_classes(tensors.expected, tensors.compute_plain().to(actual.dtype))
        )
    return {"edges": CLASS_LABELS, "engine": count_ulp_classes(tensors.expected, actual), "baseline": plain}


def comparisons_before(comparisons: Sequence[Comparison], location: TensorLocation) -> Iterable[Comparison]:
    """Return the comparisons of the same step and part up to and including the last one, latest first."""
    return takewhile(lambda found: is_same_step_and_part(found, location), reversed(comparisons))


def comparisons_after(remaining: Iterator[Comparison], location: TensorLocation) -> Iterator[Comparison]:
    """Yield the following comparisons of the same step and part, up to ``MAX_FOLLOWING_ELEMENTS`` elements."""
    left = MAX_FOLLOWING_ELEMENTS
    # After a wrong number the judge may fail on the following ones; that adds nothing to the report.
    with suppress(Exception):
        for found in remaining:
            left -= found.elements
            if left < 0 or not is_same_step_and_part(found, location):
                return
            yield found


def is_same_step_and_part(comparison: Comparison, location: TensorLocation) -> bool:
    """Return whether ``comparison`` belongs to the step and part of ``location``."""
    return comparison.location is not None and (comparison.location.step, comparison.location.part) == (
        location.step,
        location.part,
    )


def worst_layer_ratios(comparisons: Iterable[Comparison], parameter_names: Sequence[str]) -> list[LayerRatio] | None:
    """Return the worst ratio of each parameter, over its weights and optimizer state; None if nothing was compared."""
    known, worst = set(parameter_names), dict[str, float]()
    for comparison in comparisons:
        for label, ratio in ratios_by_parameter(comparison).items():
            name = label if label in known else label.rpartition("/")[0]  # state is labelled PARAMETER/KEY
            worst[name] = max(ratio, worst.get(name, 0.0))
    compared = [name for name in parameter_names if name in worst]
    group_size = math.ceil(len(compared) / MAX_LAYERS)
    groups = [compared[start : start + group_size] for start in range(0, len(compared), group_size or 1)]
    chosen = [max(group, key=worst.__getitem__) for group in groups]
    return [{"name": name, "ratio": round_ratio(worst[name], LAYER_DIGITS)} for name in chosen] or None


def ratios_by_parameter(comparison: Comparison) -> Mapping[str, float]:
    """Return the worst ratio of each parameter that ``comparison`` covers, usually one."""
    if comparison.mismatch_tensors is not None and comparison.mismatch_tensors.ratios_by_parameter:
        return comparison.mismatch_tensors.ratios_by_parameter
    return {comparison.location.name: comparison.ratio} if comparison.location else {}


def round_ratio(ratio: float, digits: int) -> JsonNumber:
    """Round a ratio to ``digits`` digits; a ratio above 1 stays above 1."""
    rounded = round_for_json(ratio, digits)
    return 1 + 10.0 ** (1 - digits) if ratio > 1 and rounded == 1 else rounded


def round_for_json(value: float, digits: int) -> JsonNumber:
    """Round ``value`` to ``digits`` digits, in the shortest form that JSON can hold."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < SHORT_INTEGER_LIMIT else rounded
