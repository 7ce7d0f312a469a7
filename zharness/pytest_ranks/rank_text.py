"""Format lists of ranks and sentences about ranks, and compare texts of different ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_ADDRESS_PATTERN = re.compile(r"\b0x[0-9a-fA-F]+\b")
_PLURAL_PREFIXES = {"was ": "were ", "sent no report of its ": "sent no report of their "}


def format_ranks(ranks: Iterable[int]) -> str:
    """Format a list of ranks as ``rank 1`` or ``ranks 0, 2-255``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    is_plural = len(runs) > 1 or len(runs[0]) > 1
    return ("ranks " if is_plural else "rank ") + ", ".join("-".join(map(str, run)) for run in runs)


def pluralize_predicate(predicate: str) -> str:
    """Change a predicate about one rank to the plural: ``was stopped`` becomes ``were stopped``."""
    for singular, plural in _PLURAL_PREFIXES.items():
        if predicate.startswith(singular):
            return plural + predicate.removeprefix(singular)
    return predicate


def format_rank_sentence(ranks: Collection[int], *predicates: str) -> str:
    """Format a sentence about ranks, such as ``ranks 0-3 failed in call; then were ended by a signal``."""
    if len(ranks) > 1:
        predicates = tuple(pluralize_predicate(predicate) for predicate in predicates)
    return f"{format_ranks(ranks)} {'; then '.join(predicates)}"


def first_line(text: str) -> str:
    """Return the first line that is not blank, stripped, or the empty string if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def mask_addresses(text: str) -> str:
    """Replace memory addresses by ``0x..``, so that equal texts of different ranks compare equal."""
    return _ADDRESS_PATTERN.sub("0x..", text)


def prefix_lines(rank: int, text: str) -> str:
    """Put ``[rank N]`` in front of every line; the result ends with a newline unless ``text`` is empty."""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
