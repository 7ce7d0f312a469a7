"""Where a release of an engine runs: here, or in processes whose search path begins with the release's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from zharness.engines import registry
from zharness.errors import MissingEngine, UsageError
from zharness.releases import checkout, overlay


@dataclass(frozen=True)
class ReleaseEnvironment:
    """A release that is ready to run: its name, what goes in front of the search path, and a child's environment.

    Both are empty for the installed release.
    """

    release: str
    search_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def prepare_release(engine: str, distribution: str) -> ReleaseEnvironment:
    """The place of the release that ``text`` names, fetched now unless it is there.

    ``text`` is NAME, NAME==RELEASE or NAME@CHECKOUT, ``distribution`` the package that NAME is part of. Raises
    MissingEngine, or UsageError for a release that cannot be had. A process that began without the place's search path
    and has imported another release, as one that forks ranks has of torch, cannot run there, nor can its forks.
    """
    found = registry.find_checkout(engine)
    if found is not None:
        path, env = checkout.prepare_checkout(found)
        return ReleaseEnvironment(found.version, (str(path),), env)
    name, release = registry.split_release(engine)
    here = get_installed_version(distribution)
    if release is None and here is None:
        raise MissingEngine(f"{name} is not installed; try: pip install 'zharness[{name}]', or name a release of it")
    if here is not None and (release is None or is_same_release(release, here)):
        return ReleaseEnvironment(here)
    assert release is not None, "one of the two is there"
    path = overlay.ensure_overlay(distribution, release)
    return ReleaseEnvironment(release, (str(path),), overlay.overlay_environment(path))


def get_installed_version(distribution: str) -> str | None:
    """The installed release; of torch without its build (``+cpu``), which decides no bug. None when there is none."""
    try:
        release = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return release.partition("+")[0] if distribution == "torch" else release


def is_same_release(release: str, installed_version: str) -> bool:
    """Whether ``release`` means ``here``, whose build it need not name."""
    try:
        return SpecifierSet(f"=={release}").contains(installed_version, prereleases=True)
    except InvalidSpecifier:
        raise UsageError(f"got release {release!r}; expected a version such as 0.18.8") from None
