"""What several ranks printed, logged and recorded in one phase, put together with each rank named."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from zharness.items.facts import Account
from zharness.items.told import PHASES
from zharness.items.words import prefixed

_CAPTURED = re.compile(r"Captured (\w+) (setup|call|teardown)")
_STREAMS = ("stdout", "stderr")


def sections(accounts: Sequence[Account], phase: str, phases: Collection[str]) -> list[tuple[str, str]]:
    """The sections of the report of ``phase``: of all ``phases``, as pytest's own reports have them.

    What a rank printed, and the sections that its own report brought along, such as its log.
    """
    texts: dict[str, str] = {}
    for account in accounts:
        own: dict[str, str] = {}
        for title, text in [*printed(account, phases), *told(account, phase)]:
            own[title] = own.get(title, "") + text
        for title, text in own.items():
            texts[title] = texts.get(title, "") + prefixed(account.rank, text)
    return sorted(((title, text) for title, text in texts.items() if text), key=lambda section: place(section[0]))


def printed(account: Account, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """A rank's output as sections; what it wrote outside of any phase belongs to setup."""
    for part in account.outcome.printed:
        label = part.label if part.label in PHASES else "setup"
        if label in phases:
            yield f"Captured {part.stream} {label}", part.text


def told(account: Account, phase: str) -> Iterator[tuple[str, str]]:
    """The sections of a rank's own report; without a report of this phase, those that had gathered until then."""
    report = account.latest(phase)
    yield from report.sections if report is not None else ()


def place(title: str) -> tuple[int, int]:
    """Where pytest would show a section: phase by phase, output before logs, what plugins add behind."""
    found = _CAPTURED.fullmatch(title)
    if found is None:
        return len(PHASES), 0
    stream = found[1]
    return PHASES.index(found[2]), _STREAMS.index(stream) if stream in _STREAMS else len(_STREAMS)


def properties(accounts: Sequence[Account], phase: str) -> list[tuple[str, object]]:
    """The user properties of all ranks: what the ranks agree on once, the rest as ``key[rank 1]``."""
    by_rank: dict[int, dict[str, list[object]]] = {}
    for account in accounts:
        report = account.latest(phase)
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
