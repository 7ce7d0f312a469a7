"""Look up the capabilities that an engine claims. An engine that is named by its factory is built once in a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from zharness import engines
from zharness.engines import Capabilities, registry
from zharness.errors import UsageError
from zharness.run.observe_and_judge import probe_capabilities
from zharness.world import RankOutcome, RankServer

NO_RELEASE = "(no release)"  # the version of an engine whose package has none


def get_claims(engine: str, stage: int, open_server: Callable[[], AbstractContextManager[RankServer]]) -> Capabilities:
    """Return the capabilities that ``engine`` claims at ``stage``. Raises UsageError if the engine cannot be built.

    ``open_server`` opens the engine's rank server; it is called only if the registry does not know the capabilities.
    """
    known = engines.capabilities(engine, stage)
    if known is not None:
        return known
    with open_server() as server:
        outcome = server.run(probe_capabilities, engine, stage)
    failure = outcome.cause
    if failure is not None:
        raise make_usage_error(failure, f"engine {engine!r} could not be built at stage {stage}: {failure.describe()}")
    claims: Capabilities = outcome.ranks[0].value
    return claims


def make_usage_error(failure: RankOutcome, fallback_message: str) -> UsageError:
    """Build the UsageError for a failure that happened before any cell ran.

    The error has the message of the failure's exception if that is an exception of zharness, else ``fallback_message``.
    """
    is_zharness_error = failure.exception.startswith("zharness.errors.")
    return UsageError(failure.cause.partition(": ")[2] if is_zharness_error else fallback_message)


def get_engine_version(engine: str) -> str:
    """Return the release or version of ``engine``, or ``(no release)`` if its package has no version."""
    return registry.resolve_version(engine) or NO_RELEASE
