"""Build the report of a mismatch for a record's JSON: heat map, shards, ULP histograms, layers and training curves.

A report consists of lists, dictionaries, strings and numbers, and takes at most about 10 KB as JSON. A number that JSON
cannot represent, such as NaN, is written as a string.
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
    """The largest ratio of error to bound in each of the ``rows`` x ``columns`` blocks of a parameter.

    The parameter is viewed as a matrix: a one-dimensional parameter has one row, and for other parameters the first
    dimension gives the rows. ``block`` contains the number of matrix rows and the number of matrix columns in a block;
    the last blocks may be smaller.
    """

    rows: int
    columns: int
    block: list[int]
    values: list[list[JsonNumber]]


class ShardRange(TypedDict):
    """The range of flat elements of a parameter that ``rank`` owns, from ``start`` up to but not including ``stop``."""

    rank: int
    start: int
    stop: int


class UlpHistograms(TypedDict):
    """Histograms of the distance between each element and its expected float64 number, in ULPs of the engine's dtype.

    ``edges`` contains the labels of the classes, and the other two lists contain the number of elements in each class:
    ``engine`` counts the engine's numbers and ``baseline`` those of plain PyTorch. If a law demands bitwise equality
    with the baseline, the expected number is the baseline's. ``baseline`` is empty if the judge has no numbers of plain
    PyTorch.
    """

    edges: list[str]
    engine: list[int]
    baseline: list[int]


class LayerRatio(TypedDict):
    """The name of one parameter, and the largest ratio of an error to its bound in that parameter."""

    name: str
    ratio: JsonNumber


class TrainingCurve(TypedDict):
    """One number per training step, such as the loss, from the engine and from a plain model trained separately."""

    engine: list[JsonNumber]
    baseline: list[JsonNumber]


class MismatchReport(TypedDict):
    """The report of the first comparison that failed; a field is None if there is nothing to show.

    ``layers`` lists parameters by depth, from the comparisons of the same step and part. If there are more than
    ``MAX_LAYERS`` parameters, only the worst of each group of neighbouring parameters is listed. ``curves`` has the
    keys "loss" and "norm" if the law trained several steps.
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
    """Build the report of the last of ``comparisons``, or return None if it passed or if its tensors are unknown.

    ``remaining`` yields the comparisons that follow. It is read only while they belong to the same step and the same
    part of the step. ``parameter_names`` lists the model's parameters in order of depth.
    """
    last = comparisons[-1]
    if last.mismatch is None or last.location is None or last.mismatch_tensors is None:
        return None
    pieces = last.location.list_pieces(last.mismatch.total)
    return {
        "parameter": last.mismatch.parameter,
        "part": last.mismatch.part.value,
        "step": last.mismatch.step,
        "shape": list(last.mismatch_tensors.ratio.shape),
        "heat": build_heat_map(last.mismatch_tensors.ratio),
        "shards": [{"rank": piece.rank, "start": piece.start, "stop": piece.stop} for piece in pieces] or None,
        "ulps": build_ulp_histograms(last.mismatch_tensors),
        "layers": worst_layer_ratios(
            chain(comparisons_before(comparisons, last.location), comparisons_after(remaining, last.location)),
            parameter_names,
        ),
        "curves": curves,
    }


def build_heat_map(ratio: Tensor) -> HeatMap:
    """Return the heat map of ``ratio``, the errors divided by their bounds; each block has its largest ratio."""
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
    """Count the elements of the engine and of plain PyTorch by their distance from the expected numbers."""
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
    """Return the comparisons of the same step and part as ``location``, the latest first.

    The search starts at the last comparison and stops before the first comparison of another step or part.
    """
    return takewhile(lambda found: is_same_step_and_part(found, location), reversed(comparisons))


def comparisons_after(remaining: Iterator[Comparison], location: TensorLocation) -> Iterator[Comparison]:
    """Yield comparisons from ``remaining`` while they belong to the same step and part as ``location``.

    Stop after ``MAX_FOLLOWING_ELEMENTS`` elements, or if the judge raises an exception.
    """
    left = MAX_FOLLOWING_ELEMENTS
    # After a wrong number the judge may raise at a later number; such an error adds nothing to the report.
    with suppress(Exception):
        for found in remaining:
            left -= found.elements
            if left < 0 or not is_same_step_and_part(found, location):
                return
            yield found


def is_same_step_and_part(comparison: Comparison, location: TensorLocation) -> bool:
    """Return whether ``comparison`` has the same step and the same part of the step as ``location``."""
    return comparison.location is not None and (comparison.location.step, comparison.location.part) == (
        location.step,
        location.part,
    )


def worst_layer_ratios(comparisons: Iterable[Comparison], parameter_names: Sequence[str]) -> list[LayerRatio] | None:
    """Return the largest ratio of error to bound of each parameter (its weights and optimizer state).

    Returns None if there are no comparisons. If there are more than ``MAX_LAYERS`` parameters, only the worst of each
    group of neighbours is returned.
    """
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
    """Return the largest ratio of error to bound for each parameter that ``comparison`` covers.

    Most comparisons cover one parameter.
    """
    if comparison.mismatch_tensors is not None and comparison.mismatch_tensors.ratios_by_parameter:
        return comparison.mismatch_tensors.ratios_by_parameter
    return {comparison.location.name: comparison.ratio} if comparison.location else {}


def round_ratio(ratio: float, digits: int) -> JsonNumber:
    """Round a ratio to ``digits`` significant digits. A ratio above 1 stays above 1, since it means failure."""
    rounded = round_for_json(ratio, digits)
    return 1 + 10.0 ** (1 - digits) if ratio > 1 and rounded == 1 else rounded


def round_for_json(value: float, digits: int) -> JsonNumber:
    """Round ``value`` to ``digits`` significant digits and return the shortest form that JSON can represent."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < SHORT_INTEGER_LIMIT else rounded
