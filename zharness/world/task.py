"""Define the tasks that ranks run, and the other requests that a client sends to a rank server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class GroupMode(Enum):
    """The default process group of the ranks while a task runs: none, a new group, or the previous task's group."""

    NONE = "none"
    DEFAULT = "default"  # a new default group
    REUSED = "reused"  # the default group of the pool's previous task; a new group if there is none


class Isolation(Enum):
    """The lifetime of ranks: either they are forked for one task, or they remain in a pool for further tasks."""

    FRESH = "fresh"
    POOLED = "pooled"
    POOLED_AFTER_ERRORS = "pooled_after_errors"  # for tasks that raise: ranks remain if all raised in one place
    EXISTING_POOL = "existing_pool"  # pooled, but fork no ranks if the pool has none: used to tear down fixtures


class CollectiveMode(Enum):
    """The choice whether torch checks, before each collective, that all ranks call the same collective.

    CHECKED sets ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, with which torch reports a mismatch; gloo alone would hang or
    compute a wrong result. The comparison adds about 1 ms to a task with one collective on 2 ranks, and more on more
    ranks (docs/ranks.md). TRUSTED turns the comparison off.
    """

    CHECKED = "checked"
    TRUSTED = "trusted"


MAX_CHECKED_WORLD_SIZE = 16  # with more ranks, comparing takes longer than the task (256 ranks: 19.7 s against 7.1 s)


@dataclass(frozen=True)
class RankTask:
    """A call of ``function(*args)`` on every one of ``world_size`` ranks, limited to ``timeout`` seconds.

    ``function`` and ``args`` are pickled and sent to a running server. Therefore ``function`` has to be defined at the
    top level of a module that was imported before the server was forked. Two tasks with different ``pool`` names never
    run on the same pooled ranks.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world_size: int = 1
    timeout: float = 60.0
    group: GroupMode = GroupMode.DEFAULT
    isolation: Isolation = Isolation.FRESH
    pool: str = ""
    collectives: CollectiveMode = CollectiveMode.TRUSTED
    serial: int = 0  # numbered by the server, so that no two groups use the same rendezvous file


@dataclass(frozen=True)
class CancelRequest:
    """A request to a rank server to end the ranks of the running task. The server sends the request back as answer."""


@dataclass(frozen=True)
class ClosePoolRequest:
    """A request to a rank server to end the ranks of one pool with one world size, and to return how they ended."""

    pool: str
    world_size: int
