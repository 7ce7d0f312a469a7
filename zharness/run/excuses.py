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

from zharness.case import Case
from zharness.checks.registry import find_checks, matches
from zharness.engines.registry import split
from zharness.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERDICTS = ("fail", "crash", "hang")
REQUIRED = ("check", "upstream", "reason", "verdict", "signatures")
LISTS: Mapping[str, type] = {
    **dict.fromkeys(("stages", "world_sizes"), int),
    **dict.fromkeys(("dtypes", "models", "variants", "engine_variants", "signatures", "details"), str),
}
TEXTS = ("engine", "check", "upstream", "reason", "verdict", "releases", "documented")
_HEADER = re.compile(r"\s*\[\[\s*excuse\s*\]\]\s*(#.*)?")


@dataclass(frozen=True)
class Excuse:
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
    place: str = ""

    def covers(self, case: Case, version: str) -> bool:
        """Whether this excuse speaks of ``case`` on that release of the engine."""
        narrowed = (
            (self.stages, case.stage),
            (self.world_sizes, case.world_size),
            (self.dtypes, case.dtype),
            (self.models, case.model),
            (self.variants, case.variant),
            (self.engine_variants, case.engine_variant),
        )
        return (
            split(case.engine)[0] == self.engine
            and matches(case.check, self.check)
            and all(not allowed or value in allowed for allowed, value in narrowed)
            and self.speaks_of(version)
        )

    def tells_of(self, cause: str, details: str) -> bool:
        """Whether a cell that ended with this cause and these details failed in the way that is excused."""
        alike = any(signature in cause for signature in self.signatures)
        return alike and (not self.details or any(words in details for words in self.details))

    def speaks_of(self, version: str) -> bool:
        """Whether ``version`` is among the releases; what is no version, of an engine without any, is where all are."""
        try:
            return not self.releases or SpecifierSet(self.releases).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


@cache
def shipped(engine: str) -> tuple[Excuse, ...]:
    """The excuses for one engine that come with the package, those of its own file first. Read once a process."""
    name = split(engine)[0]
    folder = importlib.resources.files("zharness") / "excuses"
    stems = (file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return tuple(
        excuse
        for stem in sorted(stems, key=lambda stem: (stem != name, stem))
        for excuse in parsed((folder / f"{stem}.toml").read_text("utf-8"), f"zharness/excuses/{stem}.toml", stem)
        if excuse.engine == name
    )


def read_excuses(paths: Iterable[Path]) -> tuple[Excuse, ...]:
    """A user's own excuses. Raises UsageError, naming file and line, for a file or an entry that cannot be used."""
    found: list[Excuse] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read excuses from {str(path)!r}: {error}") from error
        found.extend(parsed(text, str(path)))
    return tuple(found)


def parsed(text: str, source: str, engine: str = "") -> tuple[Excuse, ...]:
    """The tables ``[[excuse]]`` of one file; ``engine`` and ``releases`` above them hold for those that have none.

    A table whose ``engine`` is a list is an excuse of each of them. Raises UsageError naming file and line.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is no TOML: {error}") from error
    unknown = sorted(set(content) - {"engine", "releases", "excuse"})
    if unknown:
        raise UsageError.unknown(f"key in {source}", ", ".join(unknown), ("engine", "releases", "[[excuse]]"))
    above = {"engine": engine, **{key: value for key, value in content.items() if key != "excuse"}}
    entries = content.get("excuse", [])
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if _HEADER.fullmatch(line)]
    places = [f"{source}:{line}" for line in lines] if len(lines) == len(entries) else [source] * len(entries)
    return tuple(
        parse(one, place)
        for entry, place in zip(entries, places, strict=True)
        for one in for_each_engine({**above, **entry})
    )


def for_each_engine(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``entry`` as it is, or once for each engine of the list that it names."""
    named = entry.get("engine")
    return [{**entry, "engine": engine} for engine in named] if isinstance(named, list) and named else [entry]


def parse(entry: Mapping[str, Any], place: str) -> Excuse:
    """One table. Raises UsageError for a key that is unknown, missing or of another type, or that can match nothing."""
    allowed = {*TEXTS, *LISTS, "remedy"}
    for key, value in entry.items():
        if key not in allowed:
            raise UsageError.unknown(f"key of the excuse at {place}:", key, sorted(allowed))
        if key in LISTS and not (isinstance(value, list) and all(isinstance(item, LISTS[key]) for item in value)):
            raise UsageError(f"{place}: got {key} = {value!r}; expected a list of {LISTS[key].__name__}")
        if key in TEXTS and not isinstance(value, str):
            raise UsageError(f"{place}: got {key} = {value!r}; expected a string")
    for key in ("engine", *REQUIRED):
        if not entry.get(key):
            raise UsageError(f"{place}: the excuse lacks {key!r}; it needs {', '.join(('engine', *REQUIRED))}")
    if entry["verdict"] not in VERDICTS:
        raise UsageError.unknown(f"verdict of the excuse at {place}:", entry["verdict"], VERDICTS)
    if not isinstance(entry.get("remedy", {}), Mapping):
        raise UsageError(f"{place}: got remedy = {entry['remedy']!r}; expected a table of engine options")
    try:
        SpecifierSet(entry.get("releases", ""))
        find_checks((entry["check"],))
    except (InvalidSpecifier, UsageError) as error:
        raise UsageError(f"{place}: {error}") from None
    fields: dict[str, Any] = {key: tuple(value) if key in LISTS else value for key, value in entry.items()}
    return Excuse(**fields, place=place)


def excuses_for(engine: str, own: Sequence[Excuse] = ()) -> tuple[Excuse, ...]:
    """The excuses of one engine, the user's ``own`` before the shipped ones; the first that covers a cell counts."""
    name = split(engine)[0]
    return (*(excuse for excuse in own if excuse.engine == name), *shipped(engine))


def find(case: Case, version: str, own: Sequence[Excuse] = ()) -> Excuse | None:
    """The first excuse that covers ``case``."""
    return next((excuse for excuse in excuses_for(case.engine, own) if excuse.covers(case, version)), None)
