"""The ranks of a release: what their server needs. Apart from ``place``, which starts without torch."""

from __future__ import annotations

from zharness import engines
from zharness.engines import registry
from zharness.errors import UsageError
from zharness.releases.release_environment import get_installed_version, is_same_release, prepare_release
from zharness.run import runner
from zharness.world.server import RankEnvironment


def get_release_environment(engine: str) -> RankEnvironment:
    """What the rank server of an engine needs; a release that is not the installed one is fetched first.

    Raises UsageError for a release that cannot be had, and for another one of what this process has imported.
    """
    info = engines.info(engine)
    release, here = registry.split_release(engine)[1], get_installed_version(info.distribution)
    if release is None and registry.find_checkout(engine) is None:
        return runner.build_rank_environment(engine)
    if info.distribution in registry.ALREADY_IMPORTED and not (release and here and is_same_release(release, here)):
        raise UsageError(
            f"{engine} is not the installed release, {here}, and ranks are forks of a process that has imported it; "
            f"run checks in an environment of its own: pip install {info.distribution}=={release}"
        )
    found = prepare_release(engine, info.distribution)
    own = runner.engine_search_path(engine)
    module = info.module if found.search_path else ""
    return RankEnvironment((*found.search_path, *own), found.environment, info.warm_up, module)
