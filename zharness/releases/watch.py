"""Releases and checkouts held against each other and against an earlier record, from a request to an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import click
from packaging.version import InvalidVersion, Version

from zharness import engines, step_summary
from zharness.case import Case
from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.releases import history, index, repros
from zharness.releases.bisect import Outcome, Trial, bisect, verdict, words
from zharness.releases.history import Column, Measure
from zharness.releases.history_words import differences, overview
from zharness.releases.place import place
from zharness.releases.repros import Repro
from zharness.run import Record, Request
from zharness.run.changes import FAILURES, Change, Standing, bare, signature, standing
from zharness.run.excuses import Excuse
from zharness.run.record import Verdict


def texts(engine: str, releases: Sequence[str], newest: bool) -> list[str]:
    """The releases as ``--engine`` spells them: ``0.18.8`` becomes ``deepspeed==0.18.8``, ``@PATH`` is a checkout.

    Without any it is the installed one. Raises UsageError where the newest cannot be told.
    """
    spelled = [f"{engine}{release}" if release.startswith("@") else f"{engine}=={release}" for release in releases]
    if newest:
        spelled.append(f"{engine}=={index.newest(engines.info(engine).distribution)}")
    return list(dict.fromkeys(spelled)) or [engine]


def matrix(named: Sequence[str], request: Request, measure: Measure, known: Sequence[Record]) -> int:
    """Run ``request`` on every release of ``named``, print cells x releases and the flips; the exit code.

    With ``known``, the records of an earlier run, what changed since decides: 1 when anything did. 3 when a release
    could not be run, or the harness failed in a cell. Raises UsageError when none could be run, and for a release that
    shares no cell with the record.
    """
    name = split(named[0])[0]
    earlier = history.recorded(known, name) if known else {}
    found = history.columns(named, request, measure)
    click.echo(overview(found))
    pairs = [(since(earlier, each), each) for each in found if earlier and not each.trouble]
    changed = [change for before, each in pairs for change in history.changes(before, each.records)]
    since_then = step_summary.block(differences(changed)) if earlier else ""
    step_summary.append("zharness releases", since_then, step_summary.block(overview(found)))
    if earlier:
        click.echo(f"\nsince the record of {', '.join(earlier)}:\n\n{differences(changed)}\n")
        for before, each in pairs:
            click.echo(f"{each.release}: {history.shared(before, each.records)}")
    return faults(found) or int(bool(changed))


def since(earlier: Mapping[str, Mapping[Case, Record]], now: Column) -> Mapping[Case, Record]:
    """The earlier records that ``now`` is compared with: those of its own release, else of the newest."""
    return earlier.get(now.release) or earlier[max(earlier, key=order)]


def order(release: str) -> Version:
    """A key by which releases sort; what is no version comes first."""
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0")


def faults(found: Iterable[Column]) -> int:
    """3 where a release was not run, or the harness failed in a cell; else 0."""
    failed = any(
        each.trouble or any(record.verdict is Verdict.ERROR for record in each.records.values()) for each in found
    )
    return 3 if failed else 0


def compare(base: str, change: str, request: Request, measure: Measure, own: Sequence[Excuse]) -> int:
    """Run ``request`` on both and print what differs; 1 when ``change`` breaks what is not broken on ``base``.

    What it breaks is run once more on both: on a busy machine a cell may meet its deadline once. A failure that ``own``
    excuses is printed and breaks nothing; a failure of both is neither. Raises UsageError when either cannot be run,
    or they share no cell.
    """
    found = both(base, change, request, measure)
    counted = history.shared(found[0].records, found[1].records)
    changed = history.changes(found[0].records, found[1].records)
    expected = [one for one in changed if is_excused(one, own)]
    suspects = [one for one in changed if one.kind in FAILURES and one not in expected]
    again = both(base, change, cells_alone(request, suspects), measure) if suspects else []
    broken = repeated(suspects, again)
    once = [one for one in suspects if one not in broken]
    told = differences([one for one in changed if one not in expected and one not in once])
    click.echo(told)
    for one in once:
        click.echo(f"\nSEEN ONCE {one.after.case.id}: {one.after.verdict.value}, not when both were run again")
    for record in found[1].records.values():
        if any(record.stale.endswith(excuse.place) for excuse in own if record.stale):
            click.echo(f"\nSTALE {record.case.id}: {record.stale}")
    known = sum(
        is_broken(record) and is_broken(found[1].records.get(case)) for case, record in found[0].records.items()
    )
    total = (
        f"{found[0].release} and {found[1].release}, {counted}: the change breaks {len(broken)}; "
        f"{known} are broken on both, {len(expected)} excused"
    )
    click.echo(f"\n{total}")
    step_summary.append("zharness compare", total, step_summary.block(told))
    return faults([*found, *again]) or int(bool(broken))


def both(base: str, change: str, request: Request, measure: Measure) -> list[Column]:
    """The records of both. Raises UsageError when either cannot be run."""
    found = [history.column(text, request, measure) for text in (base, change)]
    for each in found:
        if each.trouble:
            raise UsageError(f"{each.text}: {each.trouble}")
    return found


def cells_alone(request: Request, changes: Sequence[Change]) -> Request:
    """``request`` for the cells of ``changes``, and no others."""
    return replace(request, patterns=tuple(change.after.case.id for change in changes))


def repeated(suspects: Sequence[Change], again: Sequence[Column]) -> list[Change]:
    """Those of ``suspects`` that are failures when they are run ``again``, too."""
    if not again:
        return []
    failed = {
        bare(one.after.case) for one in history.changes(*(each.records for each in again)) if one.kind in FAILURES
    }
    return [one for one in suspects if bare(one.after.case) in failed]


def is_broken(record: Record | None) -> bool:
    """Whether there is a record, which says that its law is broken."""
    return record is not None and standing(record) is Standing.BROKEN


def is_excused(change: Change, own: Sequence[Excuse]) -> bool:
    """Whether one of the user's excuses covers what the change broke; those of the package speak of releases."""
    return change.kind in FAILURES and change.after.excuse in {excuse.upstream for excuse in own}


def halve(engine: str, good: str, bad: str, trial: Trial) -> int:
    """Find the release between ``good`` and ``bad`` where ``trial(release)`` turns; print each run; 0.

    Raises UsageError when either is no release on the index, or they do not differ as named.
    """
    between = span(engine, good, bad)
    oldest = Outcome.GOOD if between[0] == good else Outcome.BAD
    found = bisect(between, oldest, trial, lambda step: click.echo(words(step)))
    click.echo(verdict(found))
    return 0


def span(engine: str, good: str, bad: str) -> list[str]:
    """The releases from the older of the two to the newer, both among them. Raises UsageError for what is none."""
    distribution = engines.info(engine).distribution
    known = index.releases(distribution)
    for release in (good, bad):
        if release not in known:
            raise UsageError.unknown(f"release of {distribution}", release, known)
    if good == bad:
        raise UsageError(f"got {good} as good and as bad; name two releases")
    first, last = sorted((known.index(good), known.index(bad)))
    return list(known[first : last + 1])


def by_cells(engine: str, request: Request, measure: Measure) -> Trial:
    """A trial that runs the cells of ``request``."""
    return lambda release: outcome(history.column(f"{engine}=={release}", request, measure))


def by_repro(repro: Repro) -> Trial:
    """A trial that runs one reproduction."""
    outcomes = {repros.Verdict.REPRODUCED: Outcome.BAD, repros.Verdict.NOT_REPRODUCED: Outcome.GOOD}

    def trial(release: str) -> tuple[Outcome, str]:
        text = f"{repro.engine}=={release}"
        try:
            found = repros.run(repro, text, place(text, repros.distribution(repro.engine)))
        except UsageError as trouble:
            return Outcome.SKIPPED, str(trouble)
        return outcomes.get(found.verdict, Outcome.SKIPPED), found.evidence

    return trial


def outcome(column: Column) -> tuple[Outcome, str]:
    """Bad where any cell is broken, good where one holds and none is broken; with the reason where it is not good."""
    if column.trouble:
        return Outcome.SKIPPED, column.trouble
    records = column.records.values()
    broken = [record for record in records if is_broken(record)]
    if broken:
        return Outcome.BAD, f"{broken[0].case.id} {signature(broken[0])}"
    if any(standing(record) is Standing.HOLDS for record in records):
        return Outcome.GOOD, ""
    return Outcome.SKIPPED, next((record.cause for record in records if record.cause), "no cell shows anything")
