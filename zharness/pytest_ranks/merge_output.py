"""What several ranks printed, logged and recorded in one phase, put together with each rank named."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from zharness.pytest_ranks.phase_report import PHASES
from zharness.pytest_ranks.rank_problems import RankResult
from zharness.pytest_ranks.rank_text import prefix_lines

_CAPTURE_TITLE = re.compile(r"Captured (\w+) (setup|call|teardown)")
_STREAM_ORDER = ("stdout", "stderr")


def merge_sections(rank_results: Sequence[RankResult], phase: str, phases: Collection[str]) -> list[tuple[str, str]]:
    """The sections of the report of ``phase``: of all ``phases``, as pytest's own reports have them.

    What a rank printed, and the sections that its own report brought along, such as its log.
    """
    texts: dict[str, str] = {}
    for account in rank_results:
        own: dict[str, str] = {}
        for title, text in [*iter_output_sections(account, phases), *iter_report_sections(account, phase)]:
            own[title] = own.get(title, "") + text
        for title, text in own.items():
            texts[title] = texts.get(title, "") + prefix_lines(account.rank, text)
    return sorted(
        ((title, text) for title, text in texts.items() if text), key=lambda section: get_section_order(section[0])
    )


def iter_output_sections(rank_result: RankResult, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """A rank's output as sections; what it wrote outside of any phase belongs to setup."""
    for part in rank_result.outcome.captured_output:
        label = part.phase if part.phase in PHASES else "setup"
        if label in phases:
            yield f"Captured {part.stream} {label}", part.text


def iter_report_sections(rank_result: RankResult, phase: str) -> Iterator[tuple[str, str]]:
    """The sections of a rank's own report; without a report of this phase, those that had gathered until then."""
    report = rank_result.latest_report(phase)
    yield from report.sections if report is not None else ()


def get_section_order(title: str) -> tuple[int, int]:
    """Where pytest would show a section: phase by phase, output before logs, what plugins add behind."""
    found = _CAPTURE_TITLE.fullmatch(title)
    if found is None:
        return len(PHASES), 0
    stream = found[1]
    return PHASES.index(found[2]), _STREAM_ORDER.index(stream) if stream in _STREAM_ORDER else len(_STREAM_ORDER)


def merge_user_properties(rank_results: Sequence[RankResult], phase: str) -> list[tuple[str, object]]:
    """The user properties of all ranks: what the ranks agree on once, the rest as ``key[rank 1]``."""
    by_rank: dict[int, dict[str, list[object]]] = {}
    for account in rank_results:
        report = account.latest_report(phase)
        own = by_rank.setdefault(account.rank, {})
        for key, value in report.user_properties if report is not None else ():
            own.setdefault(key, []).append(value)
    merged: list[tuple[str, object]] = []
    for key in dict.fromkeys(key for own in by_rank.values() for key in own):
        having = {rank: own[key] for rank, own in by_rank.items() if key in own}
        # By their words: the truth of == is anything a foreign value likes, an array's for one has none.
        if len({repr(values) for values in having.values()}) == 1:
            merged += [(key, value) for value in next(iter(having.values()))]
        else:
            merged += [(f"{key}[rank {rank}]", value) for rank, values in having.items() for value in values]
    return merged
