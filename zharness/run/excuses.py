"""Expected failures, read from ``zharness/excuses/``: one file for each engine, strict in both directions."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from packaging.specifiers import SpecifierSet

from zharness.case import Case
from zharness.checks.registry import matches
from zharness.engines.registry import split
from zharness.errors import HarnessFault

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Excuse:
    """Cells that are known to fail, why, and how.

    The cell has to end with ``verdict`` and one of ``signatures`` to occur in its cause: a cell that fails otherwise is
    not excused. Empty tuples match everything; ``releases`` is a version specifier (PEP 440). With ``documented``, the
    address of documentation that states the difference, and ``remedy``, the engine options that it names, the cell is
    run again with the remedy; when it passes then, its verdict is ``contract``.
    """

    engine: str
    check: str
    upstream: str
    reason: str
    verdict: str
    signatures: tuple[str, ...]
    releases: str = ""
    stages: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    documented: str = ""
    remedy: Mapping[str, Any] = field(default_factory=dict)

    def covers(self, case: Case, version: str) -> bool:
        """Whether this excuse speaks of ``case`` on that release of the engine."""
        return (
            split(case.engine)[0] == self.engine
            and matches(case.check, self.check)
            and (not self.stages or case.stage in self.stages)
            and (not self.models or case.model in self.models)
            and (not self.variants or case.variant in self.variants)
            and SpecifierSet(self.releases).contains(version, prereleases=True)
        )


@cache
def excuses_for(engine: str) -> tuple[Excuse, ...]:
    """The excuses of one engine, in the order of its file; none where it has no file. Read once a process."""
    name = split(engine)[0]
    file = importlib.resources.files("zharness") / "excuses" / f"{name}.toml"
    if not file.is_file():
        return ()
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("excuse", [])
    return tuple(parse(name, entry) for entry in entries)


def parse(engine: str, entry: Mapping[str, Any]) -> Excuse:
    """One table of the file. Raises HarnessFault for a key that is unknown or missing: the file is package data."""
    lists = {"stages", "models", "variants", "signatures"}
    try:
        fields: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in entry.items()}
        return Excuse(engine=engine, **fields)
    except TypeError as error:
        raise HarnessFault(f"zharness/excuses/{engine}.toml: {error}, in {dict(entry)}") from error


def find(case: Case, version: str) -> Excuse | None:
    """The first excuse that covers ``case``."""
    return next((excuse for excuse in excuses_for(case.engine) if excuse.covers(case, version)), None)
