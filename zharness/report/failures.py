"""Failures in words, each with the command that shows it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zharness.report.heat_map import render_heat_map
from zharness.report.matrix import count_outcomes, outcome_name
from zharness.run.record import Record, Verdict

UNEXPECTED_OUTCOMES = ("stale", "error", "fail", "crash", "hang", "undetermined")
EXPECTED_OUTCOMES = ("excused", "contract")
MAX_CAUSE_LENGTH = 400  # characters of a cause in a list; the JSON line has all of it


def render_failures(records: Iterable[Record]) -> str:
    """What did not pass: a paragraph for each cause, with a command for each cell; what was expected is folded."""
    records = list(records)
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if outcome_name(record) in UNEXPECTED_OUTCOMES:
            groups.setdefault((outcome_name(record), record.stale_reason or record.cause), []).append(record)
    return "\n\n".join(
        [
            *map(render_failure_group, groups.values()),
            *render_expected_failures(records),
            *render_withheld(records),
            *render_unsupported(records),
        ]
    )


def render_failure_group(records: Sequence[Record]) -> str:
    """Cells that failed alike: which, where the first wrong number is, and how to see each again."""
    first = records[0]
    lines = [f"{outcome_name(first).upper()} {record.cell.id}" for record in records]
    lines.append(f"  {first.stale_reason or shorten_cause(first.cause)}")
    lines.extend(f"  {line}" for line in render_heat_map(first.evidence))
    if first.verdict is Verdict.ERROR and first.details:
        lines.extend(f"  | {line}" for line in first.details.split("\n\n")[0].splitlines())
    return "\n".join([*lines, *(f"  again: {record.command}" for record in records)])


def render_expected_failures(records: Sequence[Record]) -> list[str]:
    """One paragraph for each upstream issue, or documented difference, that stands behind expected failures."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if outcome_name(record) in EXPECTED_OUTCOMES:
            groups.setdefault((outcome_name(record), record.documentation_url or record.expected_failure), []).append(
                record
            )
    return [
        f"{word.upper()} {len(found)} cells by {source}\n  for example {found[0].cell.id}\n"
        f"  {shorten_cause(found[0].cause)}\n  again: {found[0].command}"
        for (word, source), found in groups.items()
    ]


def render_withheld(records: Sequence[Record]) -> list[str]:
    """One paragraph for each feature that an engine does not claim, and whose laws hold all the same where tried."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.withheld_feature:
            groups.setdefault((record.cell.engine, record.withheld_feature), []).append(record)
    return [
        f"WITHHELD {engine} does not claim {feature}, and the law holds in {len(found)} cells:\n"
        + "\n".join(f"  {record.cell.id}" for record in found)
        for (engine, feature), found in groups.items()
    ]


def render_unsupported(records: Sequence[Record]) -> list[str]:
    """One line for each reason why cells were not run."""
    groups: dict[str, int] = {}
    for record in records:
        if record.verdict is Verdict.UNSUPPORTED:
            groups[record.cause] = groups.get(record.cause, 0) + 1
    return [f"UNSUPPORTED {count} cells: {reason}" for reason, count in groups.items()]


def shorten_cause(cause: str) -> str:
    """The first lines of a cause, on one line."""
    flat = " ".join(cause.split())
    return flat if len(flat) <= MAX_CAUSE_LENGTH else flat[:MAX_CAUSE_LENGTH] + " ..."


def render_summary(records: Sequence[Record], seconds: float) -> str:
    """The last line of a run."""
    parts = ", ".join(f"{count} {word}" for word, count in count_outcomes(records).items())
    return f"{len(records)} cells in {seconds:.1f} s: {parts}"
