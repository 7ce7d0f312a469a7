"""Merge the output, logs and user properties of several ranks, and add the rank to each line or key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from zharness.pytest_ranks.phase_report import PHASES
from zharness.pytest_ranks.rank_problems import RankResult
from zharness.pytest_ranks.rank_text import prefix_lines

_CAPTURE_TITLE = re.compile(r"Captured (\w+) (setup|call|teardown)")
_STREAM_ORDER = ("stdout", "stderr")


def merge_sections(rank_results: Sequence[RankResult], phase: str, phases: Collection[str]) -> list[tuple[str, str]]:
    """Return the captured sections of the merged report of ``phase``, as pairs of title and text.

    Each line of a text begins with its rank. ``phases`` are the phases whose output is included: pytest's reports
    repeat the output of earlier phases.
    """
    texts: dict[str, str] = {}
    for rank_result in rank_results:
        rank_texts: dict[str, str] = {}
        for title, text in [*iter_output_sections(rank_result, phases), *iter_report_sections(rank_result, phase)]:
            rank_texts[title] = rank_texts.get(title, "") + text
        for title, text in rank_texts.items():
            texts[title] = texts.get(title, "") + prefix_lines(rank_result.rank, text)
    return sorted(
        ((title, text) for title, text in texts.items() if text), key=lambda section: get_section_order(section[0])
    )


def iter_output_sections(rank_result: RankResult, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the output that a rank wrote in ``phases`` as sections.

    Output outside of any phase counts as output of setup.
    """
    for part in rank_result.outcome.captured_output:
        label = part.phase if part.phase in PHASES else "setup"
        if label in phases:
            yield f"Captured {part.stream} {label}", part.text


def iter_report_sections(rank_result: RankResult, phase: str) -> Iterator[tuple[str, str]]:
    """Yield the sections of a rank's report of ``phase`` or, without such a report, of its latest earlier report."""
    report = rank_result.latest_report(phase)
    yield from report.sections if report is not None else ()


def get_section_order(title: str) -> tuple[int, int]:
    """Return a sort key that puts sections into pytest's order.

    Sections are ordered by phase, and within a phase, output precedes logs. Sections of plugins come last.
    """
    match = _CAPTURE_TITLE.fullmatch(title)
    if match is None:
        return len(PHASES), 0
    stream = match[1]
    return PHASES.index(match[2]), _STREAM_ORDER.index(stream) if stream in _STREAM_ORDER else len(_STREAM_ORDER)


def merge_user_properties(rank_results: Sequence[RankResult], phase: str) -> list[tuple[str, object]]:
    """Merge the user properties of all ranks: list equal values once, and different values under ``key[rank 1]``."""
    by_rank: dict[int, dict[str, list[object]]] = {}
    for rank_result in rank_results:
        report = rank_result.latest_report(phase)
        rank_values = by_rank.setdefault(rank_result.rank, {})
        for key, value in report.user_properties if report is not None else ():
            rank_values.setdefault(key, []).append(value)
    merged: list[tuple[str, object]] = []
    for key in dict.fromkeys(key for rank_values in by_rank.values() for key in rank_values):
        values_by_rank = {rank: rank_values[key] for rank, rank_values in by_rank.items() if key in rank_values}
        # Compare by repr, because == of arrays, for example, has no truth value.
        if len({repr(values) for values in values_by_rank.values()}) == 1:
            merged += [(key, value) for value in next(iter(values_by_rank.values()))]
        else:
            merged += [(f"{key}[rank {rank}]", value) for rank, values in values_by_rank.items() for value in values]
    return merged
