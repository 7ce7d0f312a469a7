"""Releases and checkouts held against each other and against an earlier record, from a request to an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from zharness.releases.release_environment import prepare_release
from zharness.releases.repros import Repro
from zharness.run import Record, Request
from zharness.run.changes import FAILURE_KINDS, Change, LawStatus, failure_signature, law_status, strip_release
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.record import Verdict


def spell_releases(engine: str, releases: Sequence[str], newest: bool) -> list[str]:
    """The releases as ``--engine`` spells them: ``0.18.8`` becomes ``deepspeed==0.18.8``, ``@PATH`` is a checkout.

    Without any it is the installed one. Raises UsageError where the newest cannot be told.
    """
    spelled = [f"{engine}{release}" if release.startswith("@") else f"{engine}=={release}" for release in releases]
    if newest:
        spelled.append(f"{engine}=={index.get_newest_release(engines.info(engine).distribution)}")
    return list(dict.fromkeys(spelled)) or [engine]


def run_matrix(
    release_engines: Sequence[str], request: Request, run_request: RunRequest, earlier_records: Sequence[Record]
) -> int:
    """Run ``request`` on every release of ``named``, print cells x releases and the flips; the exit code.

    With ``known``, the records of an earlier run, what changed since decides: 1 when anything did. 3 when a release
    could not be run, or the harness failed in a cell. Raises UsageError when none could be run, and for a release that
    shares no cell with the record.
    """
    name = split_release(release_engines[0])[0]
    earlier = history.group_by_release(earlier_records, name) if earlier_records else {}
    found = history.run_releases(release_engines, request, run_request)
    click.echo(render_overview(found))
    pairs = [(select_earlier_records(earlier, each), each) for each in found if earlier and not each.failure_reason]
    changed = [change for before, each in pairs for change in history.find_changes(before, each.records)]
    since_then = step_summary.render_code_block(render_changes(changed)) if earlier else ""
    step_summary.append_section("zharness releases", since_then, step_summary.render_code_block(render_overview(found)))
    if earlier:
        click.echo(f"\nsince the record of {', '.join(earlier)}:\n\n{render_changes(changed)}\n")
        for before, each in pairs:
            click.echo(f"{each.release}: {history.describe_overlap(before, each.records)}")
    return get_fault_exit_code(found) or int(bool(changed))


def select_earlier_records(
    earlier: Mapping[str, Mapping[Cell, Record]], current: ReleaseRecords
) -> Mapping[Cell, Record]:
    """The earlier records that ``now`` is compared with: those of its own release, else of the newest."""
    return earlier.get(current.release) or earlier[max(earlier, key=version_sort_key)]


def version_sort_key(release: str) -> Version:
    """A key by which releases sort; what is no version comes first."""
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0")


def get_fault_exit_code(columns: Iterable[ReleaseRecords]) -> int:
    """3 where a release was not run, or the harness failed in a cell; else 0."""
    failed = any(
        each.failure_reason or any(record.verdict is Verdict.ERROR for record in each.records.values())
        for each in columns
    )
    return 3 if failed else 0


def compare_releases(
    base: str, change: str, request: Request, run_request: RunRequest, expected_failures: Sequence[ExpectedFailure]
) -> int:
    """Run ``request`` on both and print what differs; 1 when ``change`` breaks what is not broken on ``base``.

    What it breaks is run once more on both: on a busy machine a cell may meet its deadline once. A failure that ``own``
    excuses is printed and breaks nothing; a failure of both is neither. Raises UsageError when either cannot be run,
    or they share no cell.
    """
    found = run_both(base, change, request, run_request)
    counted = history.describe_overlap(found[0].records, found[1].records)
    changed = history.find_changes(found[0].records, found[1].records)
    expected = [one for one in changed if is_expected_failure(one, expected_failures)]
    suspects = [one for one in changed if one.kind in FAILURE_KINDS and one not in expected]
    again = run_both(base, change, restrict_to_cells(request, suspects), run_request) if suspects else []
    broken = find_repeated(suspects, again)
    once = [one for one in suspects if one not in broken]
    told = render_changes([one for one in changed if one not in expected and one not in once])
    click.echo(told)
    for one in once:
        click.echo(f"\nSEEN ONCE {one.after.cell.id}: {one.after.verdict.value}, not when both were run again")
    for record in found[1].records.values():
        if any(record.stale_reason.endswith(excuse.location) for excuse in expected_failures if record.stale_reason):
            click.echo(f"\nSTALE {record.cell.id}: {record.stale_reason}")
    known = sum(
        is_broken(record) and is_broken(found[1].records.get(case)) for case, record in found[0].records.items()
    )
    total = (
        f"{found[0].release} and {found[1].release}, {counted}: the change breaks {len(broken)}; "
        f"{known} are broken on both, {len(expected)} excused"
    )
    click.echo(f"\n{total}")
    step_summary.append_section("zharness compare", total, step_summary.render_code_block(told))
    return get_fault_exit_code([*found, *again]) or int(bool(broken))


def run_both(base: str, change: str, request: Request, run_request: RunRequest) -> list[ReleaseRecords]:
    """The records of both. Raises UsageError when either cannot be run."""
    found = [history.run_release(text, request, run_request) for text in (base, change)]
    for each in found:
        if each.failure_reason:
            raise UsageError(f"{each.engine}: {each.failure_reason}")
    return found


def restrict_to_cells(request: Request, changes: Sequence[Change]) -> Request:
    """``request`` for the cells of ``changes``, and no others."""
    return replace(request, patterns=tuple(change.after.cell.id for change in changes))


def find_repeated(suspects: Sequence[Change], second_columns: Sequence[ReleaseRecords]) -> list[Change]:
    """Those of ``suspects`` that are failures when they are run ``again``, too."""
    if not second_columns:
        return []
    failed = {
        strip_release(one.after.cell)
        for one in history.find_changes(*(each.records for each in second_columns))
        if one.kind in FAILURE_KINDS
    }
    return [one for one in suspects if strip_release(one.after.cell) in failed]


def is_broken(record: Record | None) -> bool:
    """Whether there is a record, which says that its law is broken."""
    return record is not None and law_status(record) is LawStatus.BROKEN


def is_expected_failure(change: Change, expected_failures: Sequence[ExpectedFailure]) -> bool:
    """Whether one of the user's excuses covers what the change broke; those of the package speak of releases."""
    return change.kind in FAILURE_KINDS and change.after.expected_failure in {
        excuse.upstream for excuse in expected_failures
    }


def run_bisect(engine: str, good: str, bad: str, run_trial: ReleaseTrial) -> int:
    """Find the release between ``good`` and ``bad`` where ``trial(release)`` turns; print each run; 0.

    Raises UsageError when either is no release on the index, or they do not differ as named.
    """
    between = list_releases_between(engine, good, bad)
    oldest = Outcome.GOOD if between[0] == good else Outcome.BAD
    found = bisect(between, oldest, run_trial, lambda step: click.echo(describe_step(step)))
    click.echo(describe_bisect_result(found))
    return 0


def list_releases_between(engine: str, good: str, bad: str) -> list[str]:
    """The releases from the older of the two to the newer, both among them. Raises UsageError for what is none."""
    distribution = engines.info(engine).distribution
    known = index.list_releases(distribution)
    for release in (good, bad):
        if release not in known:
            raise UsageError.unknown_name(f"release of {distribution}", release, known)
    if good == bad:
        raise UsageError(f"got {good} as good and as bad; name two releases")
    first, last = sorted((known.index(good), known.index(bad)))
    return list(known[first : last + 1])


def make_cell_trial(engine: str, request: Request, run_request: RunRequest) -> ReleaseTrial:
    """A trial that runs the cells of ``request``."""
    return lambda release: classify_release(history.run_release(f"{engine}=={release}", request, run_request))


def make_repro_trial(repro: Repro) -> ReleaseTrial:
    """A trial that runs one reproduction."""
    outcomes = {repros.ReproVerdict.REPRODUCED: Outcome.BAD, repros.ReproVerdict.NOT_REPRODUCED: Outcome.GOOD}

    def run_trial(release: str) -> tuple[Outcome, str]:
        text = f"{repro.engine}=={release}"
        try:
            found = repros.run_repro(repro, text, prepare_release(text, repros.get_distribution(repro.engine)))
        except UsageError as trouble:
            return Outcome.SKIPPED, str(trouble)
        return outcomes.get(found.verdict, Outcome.SKIPPED), found.evidence

    return run_trial


def classify_release(column: ReleaseRecords) -> tuple[Outcome, str]:
    """Bad where any cell is broken, good where one holds and none is broken; with the reason where it is not good."""
    if column.failure_reason:
        return Outcome.SKIPPED, column.failure_reason
    records = column.records.values()
    broken = [record for record in records if is_broken(record)]
    if broken:
        return Outcome.BAD, f"{broken[0].cell.id} {failure_signature(broken[0])}"
    if any(law_status(record) is LawStatus.HOLDS for record in records):
        return Outcome.GOOD, ""
    return Outcome.SKIPPED, next((record.cause for record in records if record.cause), "no cell shows anything")
