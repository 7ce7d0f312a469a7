"""The environment of the rank server for a release of an engine. Unlike ``release_environment`` this imports torch."""

from __future__ import annotations

from zharness import engines
from zharness.engines import registry
from zharness.errors import UsageError
from zharness.releases.release_environment import get_installed_version, is_same_release, prepare_release
from zharness.run import runner
from zharness.world.server import RankEnvironment


def get_release_environment(engine: str) -> RankEnvironment:
    """Return what the rank server of an engine needs, downloading a release that is not the installed one.

    Raises UsageError if the release cannot be installed, or if this process has imported another release of the
    package.
    """
    info = engines.info(engine)
    release, installed = registry.split_release(engine)[1], get_installed_version(info.distribution)
    if release is None and registry.find_checkout(engine) is None:
        return runner.build_rank_environment(engine)
    if info.distribution in registry.ALREADY_IMPORTED and not (
        release and installed and is_same_release(release, installed)
    ):
        raise UsageError(
            f"{engine} is not the installed release, {installed}, and ranks are forks of a process "
            f"that has imported it; run checks in an environment of its own: pip install {info.distribution}=={release}"
        )
    found = prepare_release(engine, info.distribution)
    engine_path = runner.engine_search_path(engine)
    module = info.module if found.search_path else ""
    return RankEnvironment((*found.search_path, *engine_path), found.environment, info.warm_up, module)
