"""Sort records into the columns of the site: one for each engine, its release, and the release of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from zharness.run.changes import strip_release
from zharness.run.outcomes import OUTCOME_ORDER, outcome_name
from zharness.run.record import Record

# The most serious outcome is first. A law holds if an engine does not support it in one cell and it holds in others.
WORST_FIRST = (*(outcome for outcome in OUTCOME_ORDER if outcome != "unsupported"), "unsupported")


@dataclass(frozen=True)
class Column:
    """One release of an engine, run with one release of torch."""

    engine: str
    version: str
    torch_version: str

    @property
    def torch_note(self) -> str:
        """``with torch RELEASE``, or an empty string if the engine is a part of torch.

        The metadata of some builds of torch lacks the label of its build, as in 2.8.0 for 2.8.0+cu128.
        """
        is_torch = self.version in (self.torch_version, self.torch_version.partition("+")[0])
        return "" if is_torch else f"with torch {self.torch_version}"

    @property
    def release(self) -> str:
        """The release of the engine, and the release of torch if the engine is not a part of torch."""
        return f"{self.version} {self.torch_note}".rstrip()

    @property
    def title(self) -> str:
        """The name of the engine and its release."""
        return f"{self.engine} {self.release}"


def find_column(record: Record) -> Column:
    """Return the column of a record. A checkout or a named release of an engine is a release of that engine."""
    return Column(strip_release(record.cell).engine, record.engine_version, record.torch_version)


def sort_columns(records: Iterable[Record]) -> tuple[Column, ...]:
    """Return every column once: engines in the order of the records, the releases of each from old to new."""
    columns = list(dict.fromkeys(map(find_column, records)))
    engines = list(dict.fromkeys(column.engine for column in columns))
    return tuple(
        sorted(
            columns,
            key=lambda column: (
                engines.index(column.engine),
                sortable_version(column.version),
                sortable_version(column.torch_version),
            ),
        )
    )


def sortable_version(text: str) -> tuple[bool, Version, str]:
    """Return a key that sorts releases from old to new; texts that are not versions come first, in alphabetic order."""
    try:
        return True, Version(text), text
    except InvalidVersion:
        return False, Version("0"), text


def worst_outcome(records: Iterable[Record]) -> str:
    """Return the most serious outcome of ``records``, or an empty string without records."""
    return min((outcome_name(record) for record in records), key=WORST_FIRST.index, default="")


def worst_record(records: Sequence[Record]) -> Record:
    """Return the first record with the most serious outcome."""
    return min(records, key=lambda record: WORST_FIRST.index(outcome_name(record)))
