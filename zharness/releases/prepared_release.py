"""Prepare a release of an engine: the installed release, or a folder at the front of a child's import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from zharness.engines import registry
from zharness.errors import MissingEngine
from zharness.releases import checkout, overlay


@dataclass(frozen=True)
class PreparedRelease:
    """A release that is ready to run: its version, the folders to put first on the import path, and the environment.

    ``environment`` contains the environment variables of a child process. For the installed release, ``search_path``
    and ``environment`` are empty.
    """

    release: str
    search_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def prepare_release(engine: str, distribution: str) -> PreparedRelease:
    """Return the release that ``engine`` names, ready to run; install an overlay if it is needed.

    ``engine`` is NAME, NAME==RELEASE or NAME@CHECKOUT, and ``distribution`` is the package of NAME. Raises
    MissingEngine if no release is named and none is installed, and UsageError if the release cannot be installed. The
    result has no effect in a process that has already imported another release of the package. A process that forks
    ranks has imported torch, so another release of torch cannot be used there.
    """
    source_checkout = registry.find_checkout(engine)
    if source_checkout is not None:
        path, env = checkout.prepare_checkout(source_checkout)
        return PreparedRelease(source_checkout.version, (str(path),), env)
    name, release = registry.split_release(engine)
    installed = get_installed_version(distribution)
    if release is None and installed is None:
        raise MissingEngine(f"{name} is not installed; try: pip install 'zharness[{name}]', or name a release")
    if installed is not None and (release is None or registry.is_same_release(release, installed)):
        return PreparedRelease(installed)
    assert release is not None, "either a release was named or one is installed"
    path = overlay.ensure_overlay(distribution, release)
    return PreparedRelease(release, (str(path),), overlay.overlay_environment(path))


def get_installed_version(distribution: str) -> str | None:
    """Return the installed release of ``distribution``, or None if it is not installed.

    For torch, a local version such as ``+cpu`` is removed.
    """
    try:
        release = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return release.partition("+")[0] if distribution == "torch" else release
