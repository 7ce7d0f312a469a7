"""Render the pages and badges of the site by the templates in assets/. Records are escaped, and nothing is fetched."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import zharness
from zharness.errors import UsageError
from zharness.laws import LAWS
from zharness.report.page import content_security_policy, read_base_styles
from zharness.report.page.columns import OUTCOME_GLYPHS, OUTCOME_MEANINGS
from zharness.run.changes import strip_release
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.outcomes import group_records, outcome_name
from zharness.run.record import Record
from zharness.site import history, table
from zharness.site.badge import describe_badge
from zharness.site.columns import WORST_FIRST, Column, find_column, sort_columns
from zharness.site.contracts import Contract, collect_contracts
from zharness.site.findings import Finding, collect_findings, find_address
from zharness.site.programs import read_program
from zharness.site.slugs import slugify

if TYPE_CHECKING:
    from jinja2 import Environment

MISSING_JINJA_MESSAGE = 'the site needs jinja2, which is not installed; install it with: pip install "zharness[report]"'

WIDEST_WITH_WORDS = 8  # columns; the squares of a wider table show signs, with words for screen readers


@dataclass(frozen=True)
class SiteFile:
    """A file of the site: its path with slashes, and its text."""

    path: str
    text: str


class Site:
    """The pages of the site of some records."""

    def __init__(
        self, records: Sequence[Record], skipped: Sequence[str] = (), user_failures: Sequence[ExpectedFailure] = ()
    ) -> None:
        self._records = records
        self._skipped = skipped
        self._by_law = group_records(records, lambda record: record.cell.law)
        self._columns = sort_columns(records)
        self._findings = collect_findings(records, user_failures)
        self._finding_of = {id(record): each for each in self._findings for record in each.records}
        self._contracts = collect_contracts(records, user_failures)
        self._badges = name_badges(self._columns)

    @property
    def size(self) -> int:
        """The number of files that ``render`` yields."""
        return 1 + len(self._by_law) + len(self._findings) + len(self._contracts) + len(self._badges)

    def render(self) -> Iterator[SiteFile]:
        """Yield every file of the site. Raises UsageError if jinja2 is missing."""
        yield self._render_index()
        for law, records in self._by_law.items():
            yield self._render_law(law, records)
        for finding in self._findings:
            yield self._render_finding(finding)
        for contract in self._contracts:
            yield self._render_contract(contract)
        for tally in self._tallies:
            yield SiteFile(
                self._badges[tally.column], self._environment.get_template("badge.svg").render(describe_badge(tally))
            )

    def _render_index(self) -> SiteFile:
        """Render the table of laws and engine releases, with its filters."""
        script = read_asset("index.js")
        outcomes = {square.outcome for row in self._rows for square in row.squares if square.outcome}
        return self._render_page(
            "index.html",
            "index.html",
            script=script,
            rows=self._rows,
            columns=self._columns,
            tallies=self._tallies,
            badges=self._badges,
            findings=self._findings,
            contracts=self._contracts,
            is_compact=len(self._columns) > WIDEST_WITH_WORDS,
            groups=[row.name for row in self._rows if row.is_group],
            engines=list(dict.fromkeys(column.engine for column in self._columns)),
            outcomes=[outcome for outcome in WORST_FIRST if outcome in outcomes],
            records=len(self._records),
            skipped=self._skipped,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        )

    def _render_law(self, law: str, records: Sequence[Record]) -> SiteFile:
        """Render the page of one law: its statement, and the history of its cells on each engine."""
        return self._render_page(
            f"laws/{law}.html",
            "law.html",
            name=law,
            law=LAWS.get(law),
            program=read_program(LAWS[law]) if law in LAWS else "",
            contracts=[contract for contract in self._contracts if law in contract.laws],
            histories=list(history.follow_law(records, self._columns)),
        )

    def _render_finding(self, finding: Finding) -> SiteFile:
        """Render the page of one finding: its reason, its issue, its reproductions, and the cells that it breaks."""
        return self._render_page(
            f"findings/{finding.key.slug}.html",
            "finding.html",
            finding=finding,
            by_column=group_records(finding.records, find_column),
        )

    def _render_contract(self, contract: Contract) -> SiteFile:
        """Render the page of one contract: the engine's documentation, its remedy, and the cells that need it."""
        return self._render_page(
            f"contracts/{contract.slug}.html",
            "contract.html",
            contract=contract,
            by_column=group_records(contract.records, find_column),
        )

    def _render_page(self, path: str, template: str, script: str = "", **values: Any) -> SiteFile:
        """Render a page at ``path`` by a template that extends layout.html."""
        styles = read_base_styles() + read_asset("site.css")
        text = self._environment.get_template(template).render(
            values,
            root="../" * path.count("/"),
            css=styles,
            script=script,
            policy=content_security_policy([script] if script else [], [styles]),
        )
        return SiteFile(path, text)

    @cached_property
    def _rows(self) -> tuple[table.Row, ...]:
        return table.build_rows(self._records, self._columns)

    @cached_property
    def _tallies(self) -> tuple[table.Tally, ...]:
        return table.count_laws(self._rows, self._columns)

    @cached_property
    def _environment(self) -> Environment:
        environment = make_environment()
        environment.globals.update(
            version=zharness.__version__,
            glyphs=OUTCOME_GLYPHS,
            meanings=OUTCOME_MEANINGS,
            outcome_name=outcome_name,
            find_column=find_column,
            find_finding=lambda record: self._finding_of.get(id(record)),
            find_address=find_address,
            describe_command=history.describe_command,
            slugify=slugify,
            quote=shlex.quote,
            strip_release=strip_release,
        )
        return environment


def make_environment() -> Environment:
    """Return jinja2's environment for the templates, with escaping. Raises UsageError if jinja2 is missing."""
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError:
        raise UsageError(MISSING_JINJA_MESSAGE) from None
    return Environment(
        loader=FunctionLoader(read_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def name_badges(columns: Sequence[Column]) -> Mapping[Column, str]:
    """Return the path of each column's badge; a number is appended to a name that an earlier column has."""
    paths: dict[Column, str] = {}
    for column in columns:
        stem = slugify("-".join(column.title.split()))
        number, path = 2, f"badges/{stem}.svg"
        while path in paths.values():
            number, path = number + 1, f"badges/{stem}-{number}.svg"
        paths[column] = path
    return paths


def read_asset(name: str) -> str:
    """Read the file ``name`` in assets/."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
