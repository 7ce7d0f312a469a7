"""Failures in words, each with the command that shows it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zharness.report.heat import heat_map
from zharness.report.matrix import counts, outcome
from zharness.run.record import Record, Verdict

ALONE = ("stale", "error", "fail", "crash", "hang", "undetermined")
EXPECTED = ("excused", "contract")
LONGEST = 400  # characters of a cause in a list; the JSON line has all of it


def failures(records: Iterable[Record]) -> str:
    """What did not pass: a paragraph for each cause, with a command for each cell; what was expected is folded."""
    records = list(records)
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if outcome(record) in ALONE:
            groups.setdefault((outcome(record), record.stale or record.cause), []).append(record)
    return "\n\n".join([*map(paragraph, groups.values()), *folded(records), *withheld(records), *unsupported(records)])


def paragraph(alike: Sequence[Record]) -> str:
    """Cells that failed alike: which, where the first wrong number is, and how to see each again."""
    first = alike[0]
    lines = [f"{outcome(first).upper()} {record.case.id}" for record in alike]
    lines.append(f"  {first.stale or shortened(first.cause)}")
    lines.extend(f"  {line}" for line in heat_map(first.evidence))
    if first.verdict is Verdict.ERROR and first.details:
        lines.extend(f"  | {line}" for line in first.details.split("\n\n")[0].splitlines())
    return "\n".join([*lines, *(f"  again: {record.command}" for record in alike)])


def folded(records: Sequence[Record]) -> list[str]:
    """One paragraph for each upstream issue, or documented difference, that stands behind expected failures."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if outcome(record) in EXPECTED:
            groups.setdefault((outcome(record), record.documented or record.excuse), []).append(record)
    return [
        f"{word.upper()} {len(found)} cells by {source}\n  for example {found[0].case.id}\n"
        f"  {shortened(found[0].cause)}\n  again: {found[0].command}"
        for (word, source), found in groups.items()
    ]


def withheld(records: Sequence[Record]) -> list[str]:
    """One paragraph for each feature that an engine does not claim, and whose laws hold all the same where tried."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.withheld:
            groups.setdefault((record.case.engine, record.withheld), []).append(record)
    return [
        f"WITHHELD {engine} does not claim {feature}, and the law holds in {len(found)} cells:\n"
        + "\n".join(f"  {record.case.id}" for record in found)
        for (engine, feature), found in groups.items()
    ]


def unsupported(records: Sequence[Record]) -> list[str]:
    """One line for each reason why cells were not run."""
    groups: dict[str, int] = {}
    for record in records:
        if record.verdict is Verdict.UNSUPPORTED:
            groups[record.cause] = groups.get(record.cause, 0) + 1
    return [f"UNSUPPORTED {count} cells: {reason}" for reason, count in groups.items()]


def shortened(cause: str) -> str:
    """The first lines of a cause, on one line."""
    flat = " ".join(cause.split())
    return flat if len(flat) <= LONGEST else flat[:LONGEST] + " ..."


def summary(records: Sequence[Record], seconds: float) -> str:
    """The last line of a run."""
    parts = ", ".join(f"{count} {word}" for word, count in counts(records).items())
    return f"{len(records)} cells in {seconds:.1f} s: {parts}"
