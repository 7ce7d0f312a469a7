"""Describe an engine of the registry: its factory, its package, and which of its cells share ranks."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache

from zharness import __version__


class PoolScope(Enum):
    """Which cells of an engine share a pool of ranks: those of one stage, or those of all stages."""

    STAGE = "stage"  # for an engine that may keep global state in its process
    ENGINE = "engine"


@dataclass(frozen=True)
class EngineInfo:
    """An entry of the registry: an engine's factory, its package and the command that installs the package.

    ``target`` is the factory, written ``module:factory``. ``distribution`` is the package whose version is the engine's
    version, and ``install`` is the command that installs that package. ``warm_up`` (``module``, or ``module:function``)
    runs once in the rank server, so that ranks are forked with the engine's modules imported. ``sources`` are the
    modules and packages whose branches `zharness hunt --coverage` measures. ``around`` is the name of the engine that
    this engine calls; the expected failures of that engine also apply to this engine. ``pool_scope`` says which cells
    share ranks.
    """

    name: str
    target: str
    summary: str
    distribution: str
    install: str
    warm_up: str = ""
    sources: tuple[str, ...] = ()
    around: str = ""
    pool_scope: PoolScope = PoolScope.STAGE

    @property
    def module(self) -> str:
        """The name of the top-level module of the package."""
        return self.distribution.replace("-", "_")

    def version(self) -> str | None:
        """Return the installed version of the engine's package, or None if the package is not installed.

        An engine of zharness itself has the version of the running code, because a clone on PYTHONPATH is not
        installed.
        """
        if self.distribution == "zharness":
            return __version__
        return _installed_version(self.distribution, tuple(sys.path))


@cache
def _installed_version(distribution: str, _path: tuple[str, ...]) -> str | None:
    """Return the version of a distribution, cached for each sys.path, to which an overlay may be added later."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
