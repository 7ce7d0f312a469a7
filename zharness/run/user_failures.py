"""Read the user's files of expected failures, whose entries must be narrow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from zharness.engines.registry import BUILT_IN, capabilities, resolve_version
from zharness.errors import UsageError
from zharness.law_kit.setting import split_settings
from zharness.run.expected_failures import AROUND, ExpectedFailure, list_bounds, parse_expected_failures
from zharness.run.shipped_failures import load_failures_around, load_shipped_failures
from zharness.toml_text import parse_toml


def read_expected_failures(paths: Iterable[Path]) -> tuple[ExpectedFailure, ...]:
    """Read the user's files of expected failures.

    Raises UsageError with file and line for a file or an entry that cannot be used.
    """
    entries: list[ExpectedFailure] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read expected failures from {str(path)!r}: {error}") from error
        entries.extend(parse_user_failures(text, str(path)))
    return tuple(entries)


def parse_user_failures(text: str, source: str) -> tuple[ExpectedFailure, ...]:
    """Parse the ``text`` of a user's file, whose entries must be narrow. Raises UsageError with file and line.

    The key ``around`` names a built-in engine whose expected failures follow those of the file.
    """
    entries = parse_expected_failures(text, source)
    for entry in entries:
        require_narrow_entry(entry)
    content = parse_toml(text, source)
    engine, around = content.get("engine"), content.get(AROUND)
    if around is None:
        return entries
    if not isinstance(around, str) or around not in BUILT_IN:
        raise UsageError.unknown_name(f"engine of the key {AROUND} in {source}:", around, sorted(BUILT_IN))
    if not isinstance(engine, str) or engine in BUILT_IN:
        raise UsageError(f"{source}: got {AROUND} and the engine {engine!r}; expected the path of a factory")
    return (*entries, *load_failures_around(around, engine))


def require_narrow_entry(entry: ExpectedFailure) -> None:
    """Raise UsageError if ``entry`` would excuse failures of every law, or if its remedy overrides its own option.

    A user's file is checked when it is read; a test checks the files of the package, because this function imports the
    engine's claims.
    """
    if "*" in (entry.check, *entry.further_laws) and not may_cover_every_law(entry):
        raise UsageError(
            f"{entry.location}: got law = '*', which would also excuse other failures of the basic laws; list the laws "
            "that fail, or give 'documented' and 'remedy', or 'releases' that end at a known one, or name "
            "'engine_variants' that all have a known_bug"
        )
    overridden = find_overridden_options(entry)
    if overridden:
        raise UsageError(f"{entry.location}: the remedy overrides {', '.join(overridden)}, which engine_variants set")


def find_overridden_options(entry: ExpectedFailure) -> list[str]:
    """Return the keys that the remedy and an option of ``engine_variants`` set; the remedy would disable the option."""
    if not entry.remedy or not entry.engine_variants:
        return []
    claims = [capabilities(entry.engine, stage) for stage in entry.stages or range(4)]
    options = [
        found.engine_options[name].options
        for found in claims
        if found
        for name in split_settings(entry.engine_variants)
        if name in found.engine_options
    ]
    return sorted({key for keys in options for key in keys if key in entry.remedy})


def may_cover_every_law(entry: ExpectedFailure) -> bool:
    """Return whether ``entry`` may have the law ``*``.

    It may if a remedy is documented, because the law has to hold with the remedy. It may if its releases end at a known
    release or earlier, because past releases do not change. It may if the engine claims, for each option that the entry
    names, a ``known_bug``, which affects every training.
    """
    if (entry.documented and entry.remedy) or _ends_at_a_known_release(entry):
        return True
    claims = [capabilities(entry.engine, stage) for stage in entry.stages]
    variants = [found.engine_options for found in claims if found is not None]
    return bool(variants and entry.engine_variants) and all(
        name in options and bool(options[name].known_bug) for options in variants for name in entry.engine_variants
    )


def _ends_at_a_known_release(entry: ExpectedFailure) -> bool:
    """Return whether the releases of ``entry`` end, at the latest with the newest installed or recorded release."""
    if entry.upper_bound is None:
        return False
    installed = resolve_version(entry.engine)
    named = {shipped.releases for shipped in load_shipped_failures(entry.engine)}
    known = [version for text in named for version in list_bounds(text, (">=", "=="))]
    known += [Version(installed)] if installed else []
    return not known or entry.upper_bound <= max(known)
