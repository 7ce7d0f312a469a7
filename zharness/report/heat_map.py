"""Draw a small map of the errors in a parameter of a failing cell for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zharness.parity.mismatch_report import JsonNumber, MismatchReport, ShardRange

# A blank means no error. The next characters mean: within the bound, up to ten times the bound, and so on, by powers of
# ten.
RATIO_CHARACTERS = " .:-=+*#%@"
LEGEND = ". within the bound, : up to 10 x, then -=+*#%@ 10 x each"
MAX_LINES, MAX_WIDTH, MAX_BARS = 5, 40, 4


def render_heat_map(evidence: MismatchReport | None) -> list[str]:
    """Return the lines of a heat map: a heading, at most five lines of at most 40 characters, and a legend.

    Each line begins with the ranks that own its elements. If a line stands for one row of the parameter, bars inside
    the line mark the ends of shards, unless the line would have more than MAX_BARS bars. Returns an empty list for a
    parameter of one element, or without evidence.
    """
    if evidence is None or evidence["heat"] is None or math.prod(evidence["shape"]) == 1:
        return []
    heat, shards = evidence["heat"], evidence["shards"] or []
    height, width = heat["block"]
    line_rows, char_columns = math.ceil(heat["rows"] / MAX_LINES), math.ceil(heat["columns"] / MAX_WIDTH)
    columns = math.prod(evidence["shape"][1:]) if len(evidence["shape"]) > 1 else evidence["shape"][0]
    drawn = []
    for top in range(0, heat["rows"], line_rows):
        ratios = downsample_rows(heat["values"][top : top + line_rows], char_columns)
        start, stop = top * height * columns, (top + line_rows) * height * columns
        line = "".join(map(ratio_character, ratios))
        if line_rows * height == 1:
            line = insert_shard_edges(line, [(shard["start"] - start) / (width * char_columns) for shard in shards])
        drawn.append((describe_owners(shards, start, stop), line))
    margin = max(len(label) for label, _ in drawn)
    shape = " x ".join(map(str, evidence["shape"]))
    return [
        f"error / bound of {evidence['parameter']} ({shape}), {line_rows * height} x {width * char_columns} elements "
        "per character:",
        *(f"  {label:{margin}} |{line}|" for label, line in drawn),
        f"  {LEGEND}",
    ]


def downsample_rows(rows: Sequence[Sequence[JsonNumber]], column_count: int) -> list[float]:
    """Return the largest ratio in each group of ``column_count`` columns over all ``rows``."""
    worst = [max(map(ratio_magnitude, column)) for column in zip(*rows, strict=True)]
    return [max(worst[start : start + column_count]) for start in range(0, len(worst), column_count)]


def ratio_magnitude(value: JsonNumber) -> float:
    """Return a ratio as a float; NaN becomes infinity."""
    ratio = float(value)
    return math.inf if math.isnan(ratio) else ratio


def ratio_character(ratio: float) -> str:
    """Return the character that represents a ratio of error to bound in the map."""
    if ratio <= 1:
        return RATIO_CHARACTERS[ratio > 0]
    power = math.ceil(math.log10(ratio)) if math.isfinite(ratio) else len(RATIO_CHARACTERS)
    return RATIO_CHARACTERS[min(1 + max(power, 1), len(RATIO_CHARACTERS) - 1)]


def insert_shard_edges(line: str, edges: Sequence[float]) -> str:
    """Insert a bar into ``line`` at each of ``edges`` inside the line; edges count characters from its start."""
    inside = sorted({round(edge) for edge in edges if 0 < edge < len(line)} - {0, len(line)})
    if len(inside) > MAX_BARS:
        return line
    return "|".join(line[start:stop] for start, stop in zip([0, *inside], [*inside, len(line)], strict=True))


def describe_owners(shards: Sequence[ShardRange], start: int, stop: int) -> str:
    """Return the ranks that own elements from ``start`` to ``stop``, as in ``rank 0-1``."""
    ranks = sorted({shard["rank"] for shard in shards if shard["start"] < stop and start < shard["stop"]})
    if not ranks:
        return "every rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]}-{ranks[-1]}"
