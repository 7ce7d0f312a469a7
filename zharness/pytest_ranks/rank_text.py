"""Ranks and texts in words: lists of ranks, plurals, and texts that are equal but for an address."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_ADDRESS_PATTERN = re.compile(r"\b0x[0-9a-fA-F]+\b")
_PLURAL_PREFIXES = {"was ": "were ", "told nothing of its ": "told nothing of their "}


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 2-255``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    many = len(runs) > 1 or len(runs[0]) > 1
    return ("ranks " if many else "rank ") + ", ".join("-".join(map(str, run)) for run in runs)


def pluralize_predicate(predicate: str) -> str:
    """``were ended by a signal`` for ``was ended by a signal``."""
    for one, many in _PLURAL_PREFIXES.items():
        if predicate.startswith(one):
            return many + predicate.removeprefix(one)
    return predicate


def format_rank_sentence(ranks: Collection[int], *predicates: str) -> str:
    """``rank 1 was ended by a signal``; ``ranks 0-3 failed in call; then were ended by a signal``."""
    told = predicates if len(ranks) == 1 else tuple(pluralize_predicate(predicate) for predicate in predicates)
    return f"{format_ranks(ranks)} {'; then '.join(told)}"


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def mask_addresses(text: str) -> str:
    """``text`` as it would be at any address: objects and threads differ between ranks in nothing else."""
    return _ADDRESS_PATTERN.sub("0x..", text)


def prefix_lines(rank: int, text: str) -> str:
    """Every line with its rank in front, and a line end behind the last."""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
