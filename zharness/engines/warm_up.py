"""Define what a rank server imports before it forks an engine's ranks: the engine's warm-up and its import paths.

The release of the engine is the caller's choice (``releases/rank_environment.py``); by default it is the installed one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from zharness.engines.registry import info, is_factory_path
from zharness.world.server import RankEnvironment

GetEnvironment = Callable[[str], RankEnvironment]  # takes the engine's name


def build_warm_up_environment(
    engine: str = "",
    release_path: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    echo: bool = False,
) -> RankEnvironment:
    """Return the environment of the rank server that runs ``engine``; without an engine it imports nothing in advance.

    ``release_path`` has the folders of a release that is not the installed one, and ``variables`` the environment
    variables of that release. An engine that is given by the path of its factory is also searched for in the current
    directory. ``echo`` makes ranks also write their output to standard output. Raises UsageError for an unknown engine.
    """
    if not engine:
        return RankEnvironment(echo=echo)
    engine_info = info(engine)
    return RankEnvironment(
        search_path=(*release_path, *((os.getcwd(),) if is_factory_path(engine) else ())),
        environment=variables or {},
        warm_up=engine_info.warm_up,
        module=engine_info.module if release_path else "",
        echo=echo,
    )
