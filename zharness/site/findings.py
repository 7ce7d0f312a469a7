"""Group the expected failures of records into findings, with the reason, the upstream issue and the reproductions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zharness.engines.registry import is_checkout
from zharness.errors import UsageError
from zharness.releases.repros import Repro, load_catalogue
from zharness.run.changes import strip_release
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.outcomes import group_records
from zharness.run.record import Record
from zharness.site.columns import find_column, sort_columns
from zharness.site.entries import find_entry
from zharness.site.slugs import make_slug

_ISSUE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")
UNREPORTED = "no report known"  # the text of an expected failure without an issue
NO_REASON = (
    "the expected failure is not one of this release of zharness; `zharness site --expected-failures FILE` reads the "
    "file that excused it, which has the reason"
)


@dataclass(frozen=True)
class FindingKey:
    """The key of a finding, by which records are grouped: the issue or, without a report, the engine and the reason."""

    upstream: str
    engine: str = ""
    reason: str = ""

    @property
    def title(self) -> str:
        """A short name for headings and links."""
        return self.upstream if not self.engine else f"{self.engine}: {self.reason}"

    @property
    def slug(self) -> str:
        """The name of the finding's page, which is the same in every site."""
        return make_slug(self.engine or self.upstream, self.upstream, self.engine, self.reason)


@dataclass(frozen=True)
class Finding:
    """One page: the records that an issue, or one unreported cause, excuses."""

    key: FindingKey
    reasons: tuple[str, ...]
    records: tuple[Record, ...]
    repros: tuple[Repro, ...]

    @property
    def address(self) -> str:
        """The address of the issue, or an empty string."""
        return find_address(self.key.upstream)

    @property
    def example(self) -> Record:
        """A record of the newest release, if possible not of a checkout, which other users do not have."""
        candidates = [record for record in self.records if not is_checkout(record.cell.engine)] or self.records
        newest = sort_columns(candidates)[-1]
        return next(record for record in candidates if find_column(record) == newest)

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws that the finding breaks."""
        return tuple(sorted({record.cell.law for record in self.records}))


def find_address(upstream: str) -> str:
    """Return the web address of an issue, which is written as ``owner/name#1`` or as an address; else return ''."""
    issue = _ISSUE.search(upstream)
    if issue is not None:
        return f"https://github.com/{issue['repository']}/issues/{issue['number']}"
    return upstream if re.fullmatch(r"https://\S+", upstream) else ""


def find_reason(record: Record, user_failures: Sequence[ExpectedFailure] = ()) -> str:
    """Return the reason that the user's files or this package give for an expected failure, or an empty string."""

    def explains(entry: ExpectedFailure) -> bool:
        """Return whether ``entry`` expects the issue, the verdict and the error of the record."""
        return (
            entry.upstream == record.expected_failure
            and entry.verdict == record.verdict.value
            and entry.names_cause(record.cause)
        )

    found = find_entry(record, user_failures, explains)
    return found.reason if found is not None else ""


def find_key(record: Record, reason: str) -> FindingKey:
    """Return the finding to which an excused record belongs."""
    if record.expected_failure != UNREPORTED:
        return FindingKey(record.expected_failure)
    return FindingKey(UNREPORTED, strip_release(record.cell).engine, reason or NO_REASON)


def collect_findings(records: Iterable[Record], user_failures: Sequence[ExpectedFailure] = ()) -> tuple[Finding, ...]:
    """Return a finding for each cause that the records name, findings with a report first."""
    excused = [record for record in records if record.expected_failure and record.verdict.is_broken]
    reasons = {id(record): find_reason(record, user_failures) for record in excused}
    catalogue = load_repros()
    findings = [
        Finding(
            key,
            tuple(dict.fromkeys(filter(None, (reasons[id(record)] for record in group)))) or (NO_REASON,),
            tuple(group),
            tuple(repro for repro in catalogue if shows_finding(repro, key, group)),
        )
        for key, group in group_records(excused, lambda record: find_key(record, reasons[id(record)])).items()
    ]
    return tuple(sorted(findings, key=lambda finding: (bool(finding.key.engine), finding.key.title)))


def load_repros() -> tuple[Repro, ...]:
    """Return all reproductions; none if this installation lacks their scripts."""
    try:
        return load_catalogue()
    except UsageError:
        return ()


def shows_finding(repro: Repro, key: FindingKey, records: Sequence[Record]) -> bool:
    """Return whether a reproduction shows a finding: same issue or, without an issue, same law and error."""
    if not key.engine:
        address = find_address(key.upstream)
        return bool(address) and strip_kind(repro.reported) == strip_kind(address)
    return repro.reported.startswith(UNREPORTED) and any(
        strip_release(record.cell).engine == repro.engine
        and record.cell.law == repro.law
        and repro.signature in record.cause
        for record in records
    )


def strip_kind(address: str) -> str:
    """Return the address of an issue or pull request without the word ``issues`` or ``pull``."""
    return re.sub(r"/(issues|pull)/(\d+).*", r"/\2", address)
