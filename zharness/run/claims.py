"""The capabilities that an engine claims; an engine known only by its factory is built once in a rank to read them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from zharness import engines
from zharness.engines import Capabilities, registry
from zharness.errors import UsageError
from zharness.run.observe_and_judge import probe_capabilities
from zharness.world import RankOutcome, RankServer


def get_claims(engine: str, stage: int, open_server: Callable[[], AbstractContextManager[RankServer]]) -> Capabilities:
    """Return what ``engine`` claims at ``stage``. Raises UsageError if the engine cannot be built.

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
    """Build the UsageError for a failure before any cell ran: the message of zharness's own exception, or the fallback.

    ``fallback_message`` is used for exceptions of other packages.
    """
    is_own_error = failure.exception.startswith("zharness.errors.")
    return UsageError(failure.cause.partition(": ")[2] if is_own_error else fallback_message)


def get_engine_version(engine: str) -> str:
    """Return the release or version of ``engine``, or ``(no release)`` for one without a package version."""
    return registry.resolve_version(engine) or "(no release)"
