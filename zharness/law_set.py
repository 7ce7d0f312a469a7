"""Read the versions of the law set: which version brought each variant of a law, and which made it stricter.

An engine's CI pins a version, so that a newer law of zharness never turns it red. ``law_set.toml`` is the record;
``suites/meta/test_law_set.py`` compares it with the laws. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zharness.errors import UsageError
from zharness.toml_text import parse_toml

RECORD = Path(__file__).with_name("law_set.toml")


@dataclass(frozen=True)
class LawSetVersion:
    """One version of the law set.

    ``added`` are the names of the law variants that the version brought, as in ``state.resume-adamw``. ``stricter``
    maps each law variant of an earlier version that may fail since this version, on an engine that passed it before,
    to the reason.
    """

    name: str
    added: tuple[str, ...]
    stricter: Mapping[str, str]


def name_law_variant(law: str, variant: str) -> str:
    """Return the name of a law variant, as in ``state.resume-adamw``, or of the law if ``variant`` is empty."""
    return f"{law}-{variant}" if variant else law


@cache
def read_versions() -> tuple[LawSetVersion, ...]:
    """Return the versions of the law set, the oldest first."""
    return parse_versions(RECORD.read_text(encoding="utf-8"))


def parse_versions(text: str) -> tuple[LawSetVersion, ...]:
    """Parse the tables ``[[version]]`` of a record, in which ``added`` maps each law to its variants."""
    return tuple(
        LawSetVersion(
            table["name"],
            tuple(name_law_variant(law, variant) for law, variants in table["added"].items() for variant in variants),
            table.get("stricter", {}),
        )
        for table in parse_toml(text, RECORD.name)["version"]
    )


def list_later_versions(name: str, versions: Sequence[LawSetVersion]) -> Sequence[LawSetVersion]:
    """Return the versions after the one called ``name``. Raises UsageError if there is no such version."""
    names = [version.name for version in versions]
    if name not in names:
        raise UsageError.unknown_name("version of the law set", name, names, "`zharness laws versions` lists them")
    return versions[names.index(name) + 1 :]


def list_later_changes(pin: str, versions: Sequence[LawSetVersion] | None = None) -> dict[str, str]:
    """Return the law variants that are newer or stricter than the version ``pin``, each with the reason.

    Raises UsageError if there is no such version.
    """
    changes = dict[str, str]()
    for version in list_later_versions(pin, read_versions() if versions is None else versions):
        changes.update(dict.fromkeys(version.added, f"new in {version.name}"))
        changes.update({name: f"stricter since {version.name}: {why}" for name, why in version.stricter.items()})
    return changes


def describe_difference(old: str, new: str, versions: Sequence[LawSetVersion] | None = None) -> list[str]:
    """Return a line for each law variant that the version ``new`` brought or made stricter since ``old``.

    Raises UsageError for a version that does not exist, and if ``new`` is older than ``old``.
    """
    known = read_versions() if versions is None else versions
    names = [version.name for version in known]
    later = list_later_versions(new, known)
    if old in names and names.index(old) > names.index(new):
        raise UsageError(f"got {old} and {new}; expected the older version of the law set first: {new} {old}")
    changes = list_later_changes(old, known[: len(known) - len(later)])
    return [f"{name}: {change}" for name, change in sorted(changes.items())]
