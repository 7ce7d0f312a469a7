"""Expected failures: those shipped in ``zharness/excuses/`` and those of a user's files, strict in both directions."""

from __future__ import annotations

import importlib.resources
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.laws.registry import find_laws, matches_pattern

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERDICTS = ("fail", "crash", "hang")
REQUIRED_KEYS = ("check", "upstream", "reason", "verdict", "signatures")
LIST_KEYS: Mapping[str, type] = {
    **dict.fromkeys(("stages", "world_sizes"), int),
    **dict.fromkeys(("dtypes", "models", "variants", "engine_variants", "signatures", "details"), str),
}
STRING_KEYS = ("engine", "check", "upstream", "reason", "verdict", "releases", "documented")
_HEADER = re.compile(r"\s*\[\[\s*excuse\s*\]\]\s*(#.*)?")


@dataclass(frozen=True)
class ExpectedFailure:
    """Cells that are known to fail, why, and how.

    The cell has to end with ``verdict`` and one of ``signatures`` to occur in its cause: a cell that fails otherwise is
    not excused. ``details`` are for a cause that says little, a KeyError: one of them has to stand in what the ranks
    told beside it, tracebacks and output. Empty tuples match everything; ``releases`` is a version specifier (PEP 440)
    from the first to the last bad release. With ``documented``, the address of documentation that states the
    difference, and ``remedy``, the engine options that it names, the cell is run again with the remedy; when it passes
    then, its verdict is ``contract``. ``place`` is the entry's file and line.
    """

    engine: str
    check: str
    upstream: str
    reason: str
    verdict: str
    signatures: tuple[str, ...]
    releases: str = ""
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    engine_variants: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    documented: str = ""
    remedy: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""

    def covers_cell(self, cell: Cell, version: str) -> bool:
        """Whether this excuse speaks of ``case`` on that release of the engine."""
        narrowed = (
            (self.stages, cell.stage),
            (self.world_sizes, cell.world_size),
            (self.dtypes, cell.dtype),
            (self.models, cell.model),
            (self.variants, cell.variant),
            (self.engine_variants, cell.engine_variant),
        )
        return (
            split_release(cell.engine)[0] == self.engine
            and matches_pattern(cell.law, self.check)
            and all(not allowed or value in allowed for allowed, value in narrowed)
            and self.applies_to_version(version)
        )

    def matches_failure(self, cause: str, details: str) -> bool:
        """Whether a cell that ended with this cause and these details failed in the way that is excused."""
        alike = any(signature in cause for signature in self.signatures)
        return alike and (not self.details or any(words in details for words in self.details))

    def applies_to_version(self, version: str) -> bool:
        """Whether ``version`` is among the releases; what is no version, of an engine without any, is where all are."""
        try:
            return not self.releases or SpecifierSet(self.releases).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


@cache
def load_shipped_failures(engine: str) -> tuple[ExpectedFailure, ...]:
    """The excuses for one engine that come with the package, those of its own file first. Read once a process."""
    name = split_release(engine)[0]
    folder = importlib.resources.files("zharness") / "expected_failures"
    stems = (file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return tuple(
        excuse
        for stem in sorted(stems, key=lambda stem: (stem != name, stem))
        for excuse in parse_expected_failures(
            (folder / f"{stem}.toml").read_text("utf-8"), f"zharness/excuses/{stem}.toml", stem
        )
        if excuse.engine == name
    )


def read_expected_failures(paths: Iterable[Path]) -> tuple[ExpectedFailure, ...]:
    """A user's own excuses. Raises UsageError, naming file and line, for a file or an entry that cannot be used."""
    found: list[ExpectedFailure] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read excuses from {str(path)!r}: {error}") from error
        found.extend(parse_expected_failures(text, str(path)))
    return tuple(found)


def parse_expected_failures(text: str, source: str, engine: str = "") -> tuple[ExpectedFailure, ...]:
    """The tables ``[[excuse]]`` of one file; ``engine`` and ``releases`` above them hold for those that have none.

    A table whose ``engine`` is a list is an excuse of each of them. Raises UsageError naming file and line.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is no TOML: {error}") from error
    unknown = sorted(set(content) - {"engine", "releases", "excuse"})
    if unknown:
        raise UsageError.unknown_name(f"key in {source}", ", ".join(unknown), ("engine", "releases", "[[excuse]]"))
    above = {"engine": engine, **{key: value for key, value in content.items() if key != "excuse"}}
    entries = content.get("excuse", [])
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if _HEADER.fullmatch(line)]
    places = [f"{source}:{line}" for line in lines] if len(lines) == len(entries) else [source] * len(entries)
    return tuple(
        parse_entry(one, place)
        for entry, place in zip(entries, places, strict=True)
        for one in expand_engines({**above, **entry})
    )


def expand_engines(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``entry`` as it is, or once for each engine of the list that it names."""
    named = entry.get("engine")
    return [{**entry, "engine": engine} for engine in named] if isinstance(named, list) and named else [entry]


def parse_entry(entry: Mapping[str, Any], location: str) -> ExpectedFailure:
    """One table. Raises UsageError for a key that is unknown, missing or of another type, or that can match nothing."""
    allowed = {*STRING_KEYS, *LIST_KEYS, "remedy"}
    for key, value in entry.items():
        if key not in allowed:
            raise UsageError.unknown_name(f"key of the excuse at {location}:", key, sorted(allowed))
        if key in LIST_KEYS and not (
            isinstance(value, list) and all(isinstance(item, LIST_KEYS[key]) for item in value)
        ):
            raise UsageError(f"{location}: got {key} = {value!r}; expected a list of {LIST_KEYS[key].__name__}")
        if key in STRING_KEYS and not isinstance(value, str):
            raise UsageError(f"{location}: got {key} = {value!r}; expected a string")
    for key in ("engine", *REQUIRED_KEYS):
        if not entry.get(key):
            raise UsageError(f"{location}: the excuse lacks {key!r}; it needs {', '.join(('engine', *REQUIRED_KEYS))}")
    if entry["verdict"] not in VERDICTS:
        raise UsageError.unknown_name(f"verdict of the excuse at {location}:", entry["verdict"], VERDICTS)
    if not isinstance(entry.get("remedy", {}), Mapping):
        raise UsageError(f"{location}: got remedy = {entry['remedy']!r}; expected a table of engine options")
    try:
        SpecifierSet(entry.get("releases", ""))
        find_laws((entry["check"],))
    except (InvalidSpecifier, UsageError) as error:
        raise UsageError(f"{location}: {error}") from None
    fields: dict[str, Any] = {key: tuple(value) if key in LIST_KEYS else value for key, value in entry.items()}
    return ExpectedFailure(**fields, location=location)


def expected_failures_for(engine: str, user_failures: Sequence[ExpectedFailure] = ()) -> tuple[ExpectedFailure, ...]:
    """The excuses of one engine, the user's ``own`` before the shipped ones; the first that covers a cell counts."""
    name = split_release(engine)[0]
    return (*(excuse for excuse in user_failures if excuse.engine == name), *load_shipped_failures(engine))


def find_expected_failure(
    cell: Cell, version: str, user_failures: Sequence[ExpectedFailure] = ()
) -> ExpectedFailure | None:
    """The first excuse that covers ``case``."""
    return next(
        (excuse for excuse in expected_failures_for(cell.engine, user_failures) if excuse.covers_cell(cell, version)),
        None,
    )
