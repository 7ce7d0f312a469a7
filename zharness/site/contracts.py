"""Group the cells that hold only under a documented remedy into contracts, by the engine's documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zharness.run.changes import strip_release
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.outcomes import group_records
from zharness.run.record import Record, Verdict
from zharness.site.entries import find_entry
from zharness.site.slugs import make_slug


@dataclass(frozen=True)
class Remedy:
    """Engine options, and the records that hold under them."""

    options: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """The ids of the records' cells, each once."""
        return tuple(dict.fromkeys(strip_release(record.cell).id for record in self.records))


@dataclass(frozen=True)
class Contract:
    """One page: the records that hold under the remedies that ``address``, a page of the engine, recommends."""

    engine: str
    reason: str
    address: str
    remedies: tuple[Remedy, ...]
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        """A short name for headings and links."""
        return f"{self.engine}: {self.reason}"

    @property
    def slug(self) -> str:
        """The name of the contract's page, which is the same in every site."""
        return make_slug(self.engine, self.reason, self.address)

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws that need the remedy."""
        return tuple(sorted({record.cell.law for record in self.records}))


def collect_contracts(records: Iterable[Record], user_failures: Sequence[ExpectedFailure] = ()) -> tuple[Contract, ...]:
    """Return a contract for each engine, reason and documented address of the records."""
    contracts = [record for record in records if record.verdict is Verdict.CONTRACT]
    groups = group_records(
        contracts, lambda record: (strip_release(record.cell).engine, record.cause, record.documentation_url)
    )
    return tuple(
        Contract(*key, collect_remedies(group, user_failures), tuple(group)) for key, group in sorted(groups.items())
    )


def collect_remedies(records: Sequence[Record], user_failures: Sequence[ExpectedFailure]) -> tuple[Remedy, ...]:
    """Return each remedy of the records once. Records that no entry covers are left out."""
    options = {id(record): find_remedy(record, user_failures) for record in records}
    covered = [record for record in records if options[id(record)]]
    groups = group_records(covered, lambda record: repr(sorted(options[id(record)].items())))
    return tuple(Remedy(options[id(group[0])], tuple(group)) for group in groups.values())


def find_remedy(record: Record, user_failures: Sequence[ExpectedFailure]) -> Mapping[str, Any]:
    """Return the engine options under which a record holds; empty if no entry with its reason covers its cell.

    Entries with the same reason and address have different remedies for different models, options and laws.
    """
    contract = (record.cause, record.documentation_url)
    found = find_entry(record, user_failures, lambda entry: (entry.reason, entry.documented) == contract)
    return found.remedy if found is not None else {}
