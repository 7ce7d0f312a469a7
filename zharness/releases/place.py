"""Where a release of an engine runs: here, or in a server whose search path begins with the release's own folder."""

from __future__ import annotations

from zharness import engines
from zharness.engines.registry import split
from zharness.releases import overlay
from zharness.run import runner
from zharness.world.server import Surroundings


def surroundings(name: str) -> Surroundings:
    """What the rank server of ``NAME==RELEASE`` needs; a release that is not the installed one is fetched first.

    Raises UsageError for a release that cannot be had.
    """
    release = split(name)[1]
    info = engines.info(name)
    # Only an engine that is its package can be had in another release here: torch under this process stays torch.
    is_its_package = info.distribution == info.name
    if release is None or release == info.version() or not is_its_package:
        return runner.surroundings(name)
    path = overlay.ensure(info.distribution, release)
    return Surroundings((str(path),), overlay.environment(path), info.warm_up)
