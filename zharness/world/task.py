"""A task for a group of ranks, and the requests to a rank server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Group(Enum):
    """The process group that the ranks have while a task runs."""

    NONE = "none"
    DEFAULT = "default"  # a new default group
    REUSED = "kept"  # the default group of the pool's previous task; a new group if there is none


class Isolation(Enum):
    """The lifetime of ranks: they are forked for one task, or stay in a pool for further tasks."""

    FRESH = "fresh"
    POOLED = "pooled"
    EXISTING_POOL = "living"  # pooled, but fork no ranks if the pool has none: used to tear down fixtures


class CollectiveMode(Enum):
    """The choice whether torch compares every collective between the ranks before the collective runs.

    CHECKED is ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: it reports a mismatch, with which gloo alone would hang or compute a
    wrong result. It costs about 2 ms per collective on 2 ranks, and more on larger worlds.
    """

    CHECKED = "checked"
    TRUSTED = "trusted"


MAX_CHECKED_WORLD_SIZE = 16  # with more ranks, comparing takes longer than the task (256 ranks: 19.7 s against 7.1 s)


@dataclass(frozen=True)
class RankTask:
    """A call of ``function(*args)`` on every one of ``world_size`` ranks, limited to ``timeout`` seconds.

    ``function`` and ``args`` are pickled on their way to a running server, so ``function`` has to be a module-level
    function whose module was imported before the server was forked. Tasks with different ``pool`` names never share
    pooled ranks.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world_size: int = 1
    timeout: float = 60.0
    group: Group = Group.DEFAULT
    isolation: Isolation = Isolation.FRESH
    pool: str = ""
    collectives: CollectiveMode = CollectiveMode.TRUSTED
    serial: int = 0  # numbered by the server, so that no two groups use the same rendezvous file


@dataclass(frozen=True)
class CancelRequest:
    """A request to a server to end the ranks of the running task; the server answers with this request."""


@dataclass(frozen=True)
class ClosePoolRequest:
    """A request to a server to end the ranks of one pool and world size, and to return how they ended."""

    pool: str
    world_size: int
