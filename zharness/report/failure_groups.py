"""Group failed cells by cause, and find the smallest cell of a group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from zharness.run.outcomes import group_records, outcome_name
from zharness.run.record import Record
from zharness.workload import MODELS

_CONFIGURATION = re.compile(r"\{[^{}]*\}")  # a configuration without nested braces
_FACTOR = re.compile(r"-?\d[\d.e+-]*(?= x the right)")
# The texts that differ between cells that fail for one reason; the order matters: the first two may contain numbers.
_CELL_DETAILS = (
    (re.compile(r"(; )?at the end of '.*'$"), ""),  # a program
    (re.compile(r"\b[a-z_]\w*(?:\.\w+)+\b"), "NAME"),  # a parameter
    (re.compile(r"-?\b(?![\d.e+-]+ x the right)\d+(?:\.\d+)?(?:e[+-]?\d+)?\b"), "N"),
    (re.compile(r"\s+"), " "),
)
_GENERIC_HINT = re.compile(r"only \d+ of \d+ elements are wrong|")  # says nothing about the cause


def group_failures(records: Iterable[Record]) -> list[list[Record]]:
    """Group failed records by cause, the largest group first, and sort each group from its smallest cell."""
    groups = [sorted(group, key=cell_size) for group in group_records(records, failure_cause).values()]
    return sorted(groups, key=len, reverse=True)


def failure_cause(record: Record) -> tuple[str, ...]:
    """Return the outcome and the cause of a failed record, without details that differ between cells with one bug.

    The cause of a wrong number is the part of the step with the hint, or with the law if there is no hint. The cause of
    any other failure is the recorded cause without ranks, numbers, configurations and names of parameters.
    """
    mismatch = record.divergence
    if record.stale_reason:
        return outcome_name(record), record.stale_reason
    if mismatch is None:
        return outcome_name(record), remove_cell_details(record.cause)
    hint = "" if _GENERIC_HINT.fullmatch(mismatch.hint) else remove_cell_details(mismatch.hint)
    return outcome_name(record), mismatch.part.value, hint or f"law {record.cell.law}"


def remove_cell_details(text: str) -> str:
    """Replace configurations, names with dots, and numbers in ``text`` by placeholders.

    The factor of ``2 x the right gradient`` says which bug it is. It is kept, to 4 digits.
    """
    while text != (text := _CONFIGURATION.sub("CONFIGURATION", text)):
        pass
    text = _FACTOR.sub(lambda factor: f"{float(factor[0]):.4g}", text)
    for pattern, placeholder in _CELL_DETAILS:
        text = pattern.sub(placeholder, text)
    return text


def cell_size(record: Record) -> tuple[int, int, int, int]:
    """Return a sort key that puts the smallest cell first. The key compares ranks, options, model and stage."""
    cell, models = record.cell, list(MODELS)
    position = models.index(cell.model) if cell.model in models else len(models)
    return cell.world_size, len(cell.engine_variant), position, cell.stage


def describe_extent(records: Sequence[Record]) -> str:
    """Describe the cells of a group of failures: the number of cells in each group of laws, and the stages."""
    counts = Counter(record.cell.law.partition(".")[0] for record in records)
    laws = ", ".join(f"{count} of {name}" for name, count in counts.most_common())
    stages = ", ".join(map(str, sorted({record.cell.stage for record in records})))
    return f"{laws}; stage{'s' if ',' in stages else ''} {stages}"
