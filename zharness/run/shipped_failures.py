"""Load the expected failures that the package ships in ``zharness/expected_failures/``."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from zharness.engines.registry import BUILT_IN, capabilities, resolve_version, split_release
from zharness.errors import MissingEngine
from zharness.law_kit.setting import Setting
from zharness.names import STAGES
from zharness.run.expected_failures import ExpectedFailure, parse_expected_failures


def expected_failures_for(engine: str, user_failures: Sequence[ExpectedFailure] = ()) -> tuple[ExpectedFailure, ...]:
    """Return the expected failures of one engine; entries of the user come before entries of the package.

    The first entry that covers a cell and describes its failure applies to it.
    """
    name = split_release(engine)[0]
    return (*(entry for entry in user_failures if entry.engine == name), *load_shipped_failures(engine))


@cache
def load_shipped_failures(engine: str) -> tuple[ExpectedFailure, ...]:
    """Load the expected failures of one engine that the package ships.

    Entries of the engine's options come first (``ENGINE_options.toml``), then entries of the engine's own file, then
    entries of the engine around which it is built.
    """
    return (*load_own_failures(split_release(engine)[0]), *list_failures_around(engine))


@cache
def list_failures_around(engine: str) -> tuple[ExpectedFailure, ...]:
    """Return the expected failures of the engine around which ``engine`` is built, as entries of ``engine``."""
    name = split_release(engine)[0]
    around = BUILT_IN[name].around if name in BUILT_IN else ""
    return tuple(load_failures_around(around, name)) if around else ()


def load_failures_around(around: str, engine: str) -> Iterator[ExpectedFailure]:
    """Yield the expected failures of the installed engine ``around`` as entries of ``engine``, which is built on it.

    An entry for settings of ``around`` applies to the settings whose options ``engine`` also has. Windows and calls of
    backward are not options, so that every engine has them. An engine that is given by its path claims no options here.
    """
    names = list_option_names(engine)
    for entry in load_shipped_failures(around):
        variants = tuple(name for name in entry.engine_variants if names.issuperset(Setting.parse(name).options))
        if bool(variants) == bool(entry.engine_variants) and entry.applies_to_version(resolve_version(around) or ""):
            yield replace(entry, engine=engine, engine_variants=variants, releases="")


def list_option_names(engine: str) -> frozenset[str]:
    """Return the options that an engine claims before it is built; empty if it is given by path or not installed."""
    try:
        claims = [capabilities(engine, stage) for stage in STAGES]
    except MissingEngine:
        return frozenset()
    return frozenset(name for found in claims if found is not None for name in found.engine_options)


def load_own_failures(name: str) -> Iterator[ExpectedFailure]:
    """Yield the entries of one engine in the files of the package."""
    files = load_shipped_files()
    for stem in sorted(files, key=lambda stem: (stem != f"{name}_options", stem != name, stem)):
        yield from (entry for entry in files[stem] if entry.engine == name)


@cache
def load_shipped_files() -> Mapping[str, tuple[ExpectedFailure, ...]]:
    """Load the files of expected failures that the package ships, by the names of the files without ``.toml``."""
    folder = importlib.resources.files("zharness") / "expected_failures"
    stems = [file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")]
    texts = {stem: (folder / f"{stem}.toml").read_text("utf-8") for stem in stems}
    return {
        stem: parse_expected_failures(text, f"zharness/expected_failures/{stem}.toml", stem)
        for stem, text in texts.items()
    }
