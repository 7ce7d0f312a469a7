"""The ranks of a release: what their server needs. Apart from ``place``, which starts without torch."""

from __future__ import annotations

from zharness import engines
from zharness.engines import registry
from zharness.errors import UsageError
from zharness.releases.place import installed, means, place
from zharness.run import runner
from zharness.world.server import Surroundings


def surroundings(name: str) -> Surroundings:
    """What the rank server of an engine needs; a release that is not the installed one is fetched first.

    Raises UsageError for a release that cannot be had, and for another one of what this process has imported.
    """
    info = engines.info(name)
    release, here = registry.split(name)[1], installed(info.distribution)
    if release is None and registry.checkout(name) is None:
        return runner.surroundings(name)
    if info.distribution in registry.IN_USE and not (release and here and means(release, here)):
        raise UsageError(
            f"{name} is not the installed release, {here}, and ranks are forks of a process that has imported it; "
            f"run checks in an environment of its own: pip install {info.distribution}=={release}"
        )
    found = place(name, info.distribution)
    own = runner.search_path(name)
    module = info.module if found.search_path else ""
    return Surroundings((*found.search_path, *own), found.environment, info.warm_up, module)
