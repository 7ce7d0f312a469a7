"""Run laws on several releases or checkouts, and compare the results with each other or with an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import click
from packaging.version import InvalidVersion, Version

from zharness import engines, step_summary
from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.releases import history, index, repros
from zharness.releases.bisect import Outcome, ReleaseTrial, bisect, describe_bisect_result, describe_step
from zharness.releases.history import ReleaseRecords, RunRequest
from zharness.releases.history_table import render_changes, render_overview
from zharness.releases.prepared_release import prepare_release
from zharness.releases.repros import Repro
from zharness.run import Record, Request
from zharness.run.changes import FAILURE_KINDS, Change, LawStatus, failure_signature, law_status, strip_release
from zharness.run.check_loop import RunResult
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.record import Verdict


def spell_releases(engine: str, releases: Sequence[str], newest: bool) -> list[str]:
    """Return the releases as ``--engine`` spells them, such as ``deepspeed==0.18.8`` or ``deepspeed@PATH``.

    In ``releases``, a text that starts with ``@`` is the path of a checkout. If ``releases`` is empty, the result is
    the engine's name, which means the installed release. If ``newest`` is True, the result includes the newest release
    on the package index. Raises UsageError if the index cannot be read.
    """
    spelled = [f"{engine}{release}" if release.startswith("@") else f"{engine}=={release}" for release in releases]
    if newest:
        spelled.append(f"{engine}=={index.get_newest_release(engines.info(engine).distribution)}")
    return list(dict.fromkeys(spelled)) or [engine]


def run_matrix(
    release_engines: Sequence[str], request: Request, run_request: RunRequest, earlier_records: Sequence[Record]
) -> int:
    """Run ``request`` on every release, print the verdicts of each cell on each release, and return the exit code.

    The exit code is 3 if a release could not be run or the harness failed in a cell. Otherwise it is 1 if a cell
    changed since ``earlier_records``, and 0 if not. Raises UsageError if no release could be run, or if a release has
    no cell in common with the earlier records.
    """
    name = split_release(release_engines[0])[0]
    earlier = history.group_by_release(earlier_records, name) if earlier_records else {}
    columns = history.run_releases(release_engines, request, run_request)
    click.echo(render_overview(columns))
    pairs = [
        (select_earlier_records(earlier, column), column) for column in columns if earlier and not column.failure_reason
    ]
    changed = [change for before, column in pairs for change in history.find_changes(before, column.records)]
    since_then = step_summary.render_code_block(render_changes(changed)) if earlier else ""
    step_summary.append_section(
        "zharness releases", since_then, step_summary.render_code_block(render_overview(columns))
    )
    if earlier:
        click.echo(f"\nsince the record of {', '.join(earlier)}:\n\n{render_changes(changed)}\n")
        for before, column in pairs:
            click.echo(f"{column.release}: {history.describe_overlap(before, column.records)}")
    return get_fault_exit_code(columns) or int(bool(changed))


def select_earlier_records(
    earlier: Mapping[str, Mapping[Cell, Record]], current: ReleaseRecords
) -> Mapping[Cell, Record]:
    """Return the earlier records of the same release or, if there are none, of the newest earlier release."""
    return earlier.get(current.release) or earlier[max(earlier, key=version_sort_key)]


def version_sort_key(release: str) -> Version:
    """Return the key by which releases are sorted. A text that is not a version is sorted before all versions."""
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0")


def get_fault_exit_code(columns: Iterable[ReleaseRecords]) -> int:
    """Return 3 if a release was not run or if the harness failed in a cell, else 0."""
    failed = any(
        column.failure_reason or any(record.verdict is Verdict.ERROR for record in column.records.values())
        for column in columns
    )
    return 3 if failed else 0


def compare_releases(
    base: str,
    change: str,
    request: Request,
    run_request: RunRequest,
    expected_failures: Sequence[ExpectedFailure],
    run_changed: Callable[[Request], RunResult] | None = None,
) -> int:
    """Run ``request`` on the releases ``base`` and ``change``, print the differences, and return the exit code.

    The exit code is 3 if the harness failed in a cell. Otherwise it is 1 if a law holds on ``base`` and is broken on
    ``change``, and 0 if not. New failures are run a second time on both releases, because a busy machine may miss a
    deadline once. A failure that ``expected_failures`` cover is printed but does not count, and a failure on both
    releases does not count either. If ``run_changed`` is not None, it runs the cells of ``request`` that reach the
    change on ``change``, and only the broken ones of these cells run on ``base``. Raises UsageError if a release cannot
    be run, or if the two releases have no cell in common.
    """
    if run_changed is None:
        found = run_both(base, change, request, run_request)
        counted = history.describe_overlap(found[0].records, found[1].records)
    else:
        found, counted = run_change_first(base, change, request, run_request, run_changed)
    changed = history.find_changes(found[0].records, found[1].records)
    expected = [flip for flip in changed if is_expected_failure(flip, expected_failures)]
    suspects = [flip for flip in changed if flip.kind in FAILURE_KINDS and flip not in expected]
    suspected = restrict_to_cells(request, (suspect.after for suspect in suspects))
    again = run_both(base, change, suspected, run_request) if suspects else []
    broken = find_repeated(suspects, again)
    once = [flip for flip in suspects if flip not in broken]
    text = render_changes([flip for flip in changed if flip not in expected and flip not in once])
    click.echo(text)
    for flip in once:
        click.echo(f"\nSEEN ONCE {flip.after.cell.id}: {flip.after.verdict.value}, not in the second run of both")
    for record in found[1].records.values():
        if any(record.stale_reason.endswith(entry.location) for entry in expected_failures if record.stale_reason):
            click.echo(f"\nSTALE {record.cell.id}: {record.stale_reason}")
    known = sum(
        is_broken(record) and is_broken(found[1].records.get(cell)) for cell, record in found[0].records.items()
    )
    total = (
        f"{found[0].release} and {found[1].release}, {counted}: the change breaks {len(broken)}; "
        f"{known} are broken on both, {len(expected)} excused"
    )
    click.echo(f"\n{total}")
    step_summary.append_section("zharness compare", total, step_summary.render_code_block(text))
    return get_fault_exit_code([*found, *again]) or int(bool(broken))


def run_both(base: str, change: str, request: Request, run_request: RunRequest) -> list[ReleaseRecords]:
    """Return the records of ``base`` and of ``change``. Raises UsageError if one of the releases cannot be run."""
    return [require_records(history.run_release(text, request, run_request)) for text in (base, change)]


def run_change_first(
    base: str,
    change: str,
    request: Request,
    run_request: RunRequest,
    run_changed: Callable[[Request], RunResult],
) -> tuple[list[ReleaseRecords], str]:
    """Run the cells that reach a change on ``change``, and the broken ones of these cells on ``base``.

    Returns the records of both and a sentence with their numbers. Prints which cells were selected, and which did not
    run for lack of time. Raises UsageError if one of the releases cannot be run.
    """
    notes = list[str]()

    def run_selected(selected: Request) -> list[Record]:
        """Run the cells, and keep the sentences on these cells."""
        result = run_changed(selected)
        notes.extend(result.coverage)
        return result.records

    after = require_records(history.run_release(change, request, run_selected))
    for note in notes:
        click.echo(f"{note}\n")
    step_summary.append_section("zharness compare --changed", *notes)
    broken = [record for record in after.records.values() if is_broken(record)]
    before = history.run_release(base, restrict_to_cells(request, broken), run_request if broken else lambda _: [])
    counted = f"{len(after.records)} cells that reach the change run on it, {len(broken)} broken, run on the base too"
    return [require_records(before), after], counted


def require_records(column: ReleaseRecords) -> ReleaseRecords:
    """Return ``column``. Raises UsageError if the release could not be run."""
    if column.failure_reason:
        raise UsageError(f"{column.engine}: {column.failure_reason}")
    return column


def restrict_to_cells(request: Request, records: Iterable[Record]) -> Request:
    """Return a copy of ``request`` that runs only the cells of ``records``."""
    return replace(request, patterns=tuple(record.cell.id for record in records))


def find_repeated(suspects: Sequence[Change], second_columns: Sequence[ReleaseRecords]) -> list[Change]:
    """Return the changes in ``suspects``, the failures of the first run, whose cells also failed in the second run."""
    if not second_columns:
        return []
    failed = {
        strip_release(one.after.cell)
        for one in history.find_changes(*(each.records for each in second_columns))
        if one.kind in FAILURE_KINDS
    }
    return [suspect for suspect in suspects if strip_release(suspect.after.cell) in failed]


def is_broken(record: Record | None) -> bool:
    """Return whether ``record`` is not None and its verdict means that the law is broken."""
    return record is not None and law_status(record) is LawStatus.BROKEN


def is_expected_failure(change: Change, expected_failures: Sequence[ExpectedFailure]) -> bool:
    """Return whether ``change`` is a failure that an entry of ``expected_failures``, the user's file, covers.

    Built-in expected failures do not count, because they describe releases.
    """
    return change.kind in FAILURE_KINDS and change.after.expected_failure in {
        entry.upstream for entry in expected_failures
    }


def run_bisect(engine: str, good: str, bad: str, run_trial: ReleaseTrial) -> int:
    """Find the release between ``good`` and ``bad`` in which the outcome changes, print each run, and return 0.

    Raises UsageError if either release is not on the package index or does not have the outcome that was named.
    """
    between = list_releases_between(engine, good, bad)
    oldest = Outcome.GOOD if between[0] == good else Outcome.BAD
    result = bisect(between, oldest, run_trial, lambda step: click.echo(describe_step(step)))
    click.echo(describe_bisect_result(result))
    return 0


def list_releases_between(engine: str, good: str, bad: str) -> list[str]:
    """Return the releases from the older to the newer of ``good`` and ``bad``, both included.

    Raises UsageError if ``good`` or ``bad`` is not on the package index, or if both are the same release.
    """
    distribution = engines.info(engine).distribution
    known = index.list_releases(distribution)
    for release in (good, bad):
        if release not in known:
            raise UsageError.unknown_name(f"release of {distribution}", release, known)
    if good == bad:
        raise UsageError(f"got {good} as both the good and the bad release; name two different releases")
    first, last = sorted((known.index(good), known.index(bad)))
    return list(known[first : last + 1])


def make_cell_trial(engine: str, request: Request, run_request: RunRequest) -> ReleaseTrial:
    """Return a function that runs the cells of ``request`` on one release and returns the outcome for a bisection."""
    return lambda release: classify_release(history.run_release(f"{engine}=={release}", request, run_request))


def make_repro_trial(repro: Repro) -> ReleaseTrial:
    """Return a function that runs the reproduction ``repro`` on one release and returns the outcome for a bisection."""
    outcomes = {repros.ReproVerdict.REPRODUCED: Outcome.BAD, repros.ReproVerdict.NOT_REPRODUCED: Outcome.GOOD}

    def run_trial(release: str) -> tuple[Outcome, str]:
        text = f"{repro.engine}=={release}"
        try:
            result = repros.run_repro(repro, text, prepare_release(text, repros.get_distribution(repro.engine)))
        except UsageError as error:
            return Outcome.SKIPPED, str(error)
        return outcomes.get(result.verdict, Outcome.SKIPPED), result.evidence

    return run_trial


def classify_release(column: ReleaseRecords) -> tuple[Outcome, str]:
    """Return the outcome of one release, and the reason for this outcome.

    The outcome is BAD if any cell is broken, GOOD if no cell is broken and at least one law holds, and SKIPPED
    otherwise.
    """
    if column.failure_reason:
        return Outcome.SKIPPED, column.failure_reason
    records = column.records.values()
    broken = [record for record in records if is_broken(record)]
    if broken:
        return Outcome.BAD, f"{broken[0].cell.id} {failure_signature(broken[0])}"
    if any(law_status(record) is LawStatus.HOLDS for record in records):
        return Outcome.GOOD, ""
    return Outcome.SKIPPED, next((record.cause for record in records if record.cause), "no cell passes or fails")
