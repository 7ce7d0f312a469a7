"""Find the expected failures that cover a cell, and the one that describes how the cell failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zharness.cell import Cell
from zharness.run.expected_failures import POOLED, ExpectedFailure
from zharness.run.shipped_failures import expected_failures_for

LOSES_RANKS = ("crash", "hang")
GENERAL_CAUSES = ("ended by a signal", "by peer", "did not finish")  # a process ended, for any reason
# Ranks stop in different calls, such as all_gather_into_tensor.
UNEQUAL_CALLS = re.compile(
    r"\bin ((all_gather|all_reduce|all_to_all|broadcast|reduce_scatter)(_\w+)?|barrier|recv|reduce|send)\b"
)
# A check in every law raises this on the ranks: the verdict of the cell is `fail`, but the pool loses its ranks.
CONTRACT_CAUSE = "the engine changed requires_grad"


def list_covering_entries(
    cell: Cell, version: str, user_failures: Sequence[ExpectedFailure], isolation: str = ""
) -> list[ExpectedFailure]:
    """Return the expected failures with this ``isolation`` that cover ``cell``, in the order in which they apply."""
    entries = expected_failures_for(cell.engine, user_failures)
    return [entry for entry in entries if entry.isolation == isolation and entry.covers_cell(cell, version)]


def find_matching_failure(
    cell: Cell, version: str, verdict: str, cause: str, details: str, user_failures: Sequence[ExpectedFailure] = ()
) -> ExpectedFailure | None:
    """Return the first expected failure that covers ``cell`` and matches its ``verdict``, ``cause`` and ``details``.

    If none matches, returns the first entry that covers the cell, or None if there is none.
    """
    covering = list_covering_entries(cell, version, user_failures)
    matching = (entry for entry in covering if entry.describes_failure(verdict, cause, details))
    return next(matching, covering[0] if covering else None)


def list_similar_entries(
    cell: Cell, version: str, verdict: str, cause: str, details: str, user_failures: Sequence[ExpectedFailure] = ()
) -> list[ExpectedFailure]:
    """Return the expected failures of other cells that describe how ``cell`` failed, and name its options or its law.

    The failure of ``cell`` may have the same cause, with another law, option, world size or dtype. A person has to
    decide whether it has: these entries do not excuse the cell.
    """
    return [
        entry
        for entry in expected_failures_for(cell.engine, user_failures)
        if not entry.isolation
        and not entry.covers_cell(cell, version)
        and entry.names_cause_in(cell, version)
        and entry.describes_failure(verdict, cause, details)
    ]


def describe_known_cause(cell: Cell, version: str, verdict: str, cause: str, details: str) -> str:
    """Return a sentence about a known bug of the engine that makes other cells fail as ``cell`` did, or ''.

    A person has to decide whether this bug is the cause: the cell is not excused. Entries for engine options do not
    count, nor do entries whose signature only says that a rank ended.
    """
    for entry in expected_failures_for(cell.engine, ()):
        if (
            (not entry.stages or cell.stage in entry.stages)
            and not entry.engine_variants
            and not entry.isolation
            and entry.applies_to_version(version)
            and not any(text in signature for signature in entry.signatures for text in GENERAL_CAUSES)
            and entry.describes_failure(verdict, cause, details)
        ):
            return f"{cell.engine} has a known bug with this message ({entry.upstream}): {entry.reason}"
    return ""


def list_matchable_entries(
    cell: Cell, version: str, user_failures: Sequence[ExpectedFailure] = ()
) -> list[ExpectedFailure]:
    """Return the entries that ``find_matching_failure`` can return for ``cell``.

    These are the entries that cover the cell, except an entry if an earlier entry describes each failure that it
    describes.
    """
    covering = list_covering_entries(cell, version, user_failures)
    return [
        entry
        for index, entry in enumerate(covering)
        if not any(earlier.subsumes(entry) for earlier in covering[:index])
    ]


def find_failure_with_remedy(
    cell: Cell, version: str, verdict: str, cause: str, details: str, user_failures: Sequence[ExpectedFailure] = ()
) -> ExpectedFailure | None:
    """Return the expected failure for options of ``cell`` that describes how the cell failed under a documented remedy.

    An entry with a remedy is skipped, because it describes the failure without its remedy. Returns None if no entry is
    left.
    """
    return next(
        (
            entry
            for entry in list_covering_entries(cell, version, user_failures)
            if entry.engine_variants and not entry.remedy and entry.describes_failure(verdict, cause, details)
        ),
        None,
    )


def find_pool_failure(
    cell: Cell, version: str, verdict: str, cause: str, details: str, user_failures: Sequence[ExpectedFailure] = ()
) -> ExpectedFailure | None:
    """Return the expected failure on pooled ranks that covers ``cell`` and matches its failure, or None."""
    covering = list_covering_entries(cell, version, user_failures, POOLED)
    return next((entry for entry in covering if entry.describes_failure(verdict, cause, details)), None)


def list_crash_entries(
    cell: Cell, version: str, user_failures: Sequence[ExpectedFailure] = ()
) -> list[ExpectedFailure]:
    """Return the expected failures that say that the ranks of ``cell`` will raise an error, crash or hang."""
    covering = list_covering_entries(cell, version, user_failures)
    return [entry for entry in covering if entry.is_stale_on(cell) and loses_ranks(entry)]


def loses_ranks(entry: ExpectedFailure) -> bool:
    """Return whether the ranks cannot run another cell of the pool after this failure."""
    return entry.verdict in LOSES_RANKS or has_contract_cause(entry)


def has_contract_cause(entry: ExpectedFailure) -> bool:
    """Return whether every signature names the error that ranks raise for a changed ``requires_grad``."""
    return bool(entry.signatures) and all(CONTRACT_CAUSE in each for each in entry.signatures)


def expects_exception(entry: ExpectedFailure) -> bool:
    """Return whether the entry says that all ranks raise one exception, and do not hang, end or wait for each other."""
    has_other_end = any(
        UNEQUAL_CALLS.search(each) or any(text in each for text in GENERAL_CAUSES) for each in entry.signatures
    )
    return has_contract_cause(entry) or (entry.verdict == "crash" and not has_other_end)


def find_expected_failure(
    cell: Cell, version: str, user_failures: Sequence[ExpectedFailure] = ()
) -> ExpectedFailure | None:
    """Return the first expected failure that covers ``cell``; None if there is none."""
    return next(iter(list_covering_entries(cell, version, user_failures)), None)
