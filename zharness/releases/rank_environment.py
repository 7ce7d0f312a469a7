"""Prepare the environment of the ranks that run one release of an engine.

This module combines two modules. ``releases/prepared_release.py`` finds or installs the release, and does not import
torch. ``engines/warm_up.py`` names the modules that a rank server imports for the engine, and imports torch.
"""

from __future__ import annotations

from zharness import engines
from zharness.engines import registry
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.releases.prepared_release import get_installed_version, prepare_release
from zharness.world.server import RankEnvironment


def prepare_rank_environment(engine: str) -> RankEnvironment:
    """Return the environment of the rank server for ``engine``, which is NAME, NAME==RELEASE or NAME@CHECKOUT.

    If the release is not installed, the function builds an overlay. Raises UsageError if the engine or the release
    cannot be installed, or if this process has already imported another release of the package.
    """
    info = engines.info(engine)
    release, installed = registry.split_release(engine)[1], get_installed_version(info.distribution)
    if release is None and registry.find_checkout(engine) is None:
        engines.require(engine)
        return build_warm_up_environment(engine)
    is_installed = bool(release and installed and registry.is_same_release(release, installed))
    if info.distribution in registry.ALREADY_IMPORTED and not is_installed:
        raise UsageError(
            f"{engine} is not the installed release {installed}, which this process has imported for its ranks; "
            f"install {engine} in a separate environment: pip install {info.distribution}=={release}"
        )
    prepared = prepare_release(engine, info.distribution)
    return build_warm_up_environment(engine, prepared.search_path, prepared.environment)
