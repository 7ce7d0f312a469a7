"""Describe failed, excused, withheld and unsupported cells, and give the commands that run the cells again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zharness.report.failure_groups import describe_extent, group_failures
from zharness.report.heat_map import render_heat_map
from zharness.run.outcomes import count_cells, count_outcomes, group_records, outcome_name
from zharness.run.record import Record, Verdict

UNEXPECTED_OUTCOMES = ("stale", "error", "fail", "crash", "hang", "undetermined")
EXPECTED_OUTCOMES = ("excused", "contract")
# The CPU time of a cell is printed from this world size on: fewer ranks use less CPU time than their server's imports.
LARGE_WORLD = 16
MAX_CAUSE_LENGTH = 400  # characters; the JSON line has the whole cause
MAX_OTHER_NAMES = 6  # laws or models that a reason names beside the first
MAX_LISTED_CELLS = 4  # one for each stage; the JSON lines have every cell


def render_failures(records: Iterable[Record]) -> str:
    """Render the cells that did not pass: a paragraph for each cause of unexpected failures, with its smallest cell.

    Summaries of expected failures, withheld features and unsupported cells follow.
    """
    records = list(records)
    unexpected = [record for record in records if outcome_name(record) in UNEXPECTED_OUTCOMES]
    return "\n\n".join(
        [
            *map(render_failure_group, group_failures(unexpected)),
            *render_pool_differences(records),
            *render_expected_failures(records),
            *render_withheld(records),
            *render_unsupported(records),
        ]
    )


def render_failure_group(records: Sequence[Record]) -> str:
    """Render unexpected failures with the same cause: the cells, the cause, its heat map, and the commands.

    ``records`` start with the smallest cell. For a large group, only the smallest cell and the number of cells are
    listed.
    """
    first, outcome = records[0], outcome_name(records[0]).upper()
    listed = records if len(records) <= MAX_LISTED_CELLS else records[:1]
    lines = [f"{outcome} {record.cell.id}" for record in listed]
    if len(records) > len(listed):
        lines = [f"{outcome} {len(records)} cells with one cause, the smallest: {first.cell.id}"]
        lines.append(f"  {describe_extent(records)}")
    lines.append(f"  {first.stale_reason or shorten_cause(first.cause)}")
    if first.raising_frame and not first.stale_reason:
        lines.append(f"  raised by {first.raising_frame}")
    lines.extend(f"  {line}" for line in render_heat_map(first.evidence))
    if first.verdict is Verdict.ERROR and first.details:
        lines.extend(f"  | {line}" for line in first.details.split("\n\n")[0].splitlines())
    return "\n".join([*lines, *(f"  again: {record.command}" for record in listed)])


def render_pool_differences(records: Sequence[Record]) -> list[str]:
    """Render a line for each cell that ended differently on fresh ranks than on pooled ranks."""
    return [
        f"POOLED {record.cell.id}\n  {shorten_cause(record.pool_difference)}"
        for record in records
        if record.pool_difference
    ]


def render_expected_failures(records: Sequence[Record]) -> list[str]:
    """Render a paragraph for each upstream issue or documented difference behind expected failures."""
    expected = (record for record in records if outcome_name(record) in EXPECTED_OUTCOMES)
    groups = group_records(
        expected, lambda record: (outcome_name(record), record.documentation_url or record.expected_failure)
    )
    return [
        f"{outcome.upper()} {count_cells(len(group))} by {source}\n  for example {group[0].cell.id}\n"
        f"  {shorten_cause(group[0].cause)}\n  again: {group[0].command}"
        for (outcome, source), group in groups.items()
    ]


def render_withheld(records: Sequence[Record]) -> list[str]:
    """Render a paragraph for each feature that an engine does not claim although laws that need the feature hold."""
    withheld = (record for record in records if record.withheld_feature)
    groups = group_records(withheld, lambda record: (record.cell.engine, record.withheld_feature))
    return [
        f"WITHHELD {engine} does not claim {feature}, although the law holds in {count_cells(len(group))}:\n"
        + "\n".join(f"  {record.cell.id}" for record in group)
        for (engine, feature), group in groups.items()
    ]


def render_unsupported(records: Sequence[Record]) -> list[str]:
    """Render a line for each reason why cells were not run; one line names all laws or models of one reason."""
    unsupported = [record for record in records if record.verdict is Verdict.UNSUPPORTED]
    groups = group_records(unsupported, split_reason)
    return [
        f"UNSUPPORTED {count_cells(len(group))}: "
        + before
        + name_several(dict.fromkeys(name_in_reason(record) for record in group))
        + after
        for (before, after), group in groups.items()
    ]


def split_reason(record: Record) -> tuple[str, str]:
    """Split the reason why a cell did not run at the law or model that it begins with; return both parts."""
    name = name_in_reason(record)
    before, _, after = record.cause.partition(name) if name else (record.cause, "", "")
    return before, after


def name_in_reason(record: Record) -> str:
    """Return the law or the model with which the reason begins why a cell did not run, or an empty string."""
    for prefix, name in (("", record.cell.law), ("the model ", record.cell.model)):
        if record.cause.startswith(f"{prefix}{name} "):
            return name
    return ""


def name_several(names: Collection[str]) -> str:
    """Return the first of ``names``, with some of the other names in parentheses if there are any."""
    first, *others = names
    more = f" and {len(others) - MAX_OTHER_NAMES} more" if len(others) > MAX_OTHER_NAMES else ""
    return f"{first} (also {', '.join(others[:MAX_OTHER_NAMES])}{more})" if others else first


def shorten_cause(cause: str) -> str:
    """Return the beginning of a cause on one line."""
    line = " ".join(cause.split())
    return line if len(line) <= MAX_CAUSE_LENGTH else line[:MAX_CAUSE_LENGTH] + " ..."


def render_summary(records: Sequence[Record], seconds: float) -> str:
    """Render the last line of a run: cells, seconds, and outcomes."""
    parts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(records).items())
    return f"{count_cells(len(records))} in {seconds:.1f} s: {parts}"


def render_rank_costs(records: Sequence[Record]) -> str:
    """Render a line for each cell of LARGE_WORLD ranks or more that ran: the CPU time of all ranks, and of one rank."""
    return "\n".join(
        f"{record.cell.id}: {record.cell.world_size} ranks took {record.rank_cpu_seconds:.1f} s of CPU, "
        f"{record.rank_cpu_seconds / record.cell.world_size:.2f} s each"
        for record in records
        if record.rank_cpu_seconds is not None and record.cell.world_size >= LARGE_WORLD
    )
