"""What a group of ranks is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Group(Enum):
    """The process group that the ranks have while their function runs."""

    NONE = "none"
    DEFAULT = "default"  # a new default group
    REUSED = "kept"  # the default group of the work before, in ranks that live on; a new one where there is none


class Isolation(Enum):
    """Whether ranks are forked for one piece of work, or live on and take the next one."""

    FRESH = "fresh"
    POOLED = "pooled"
    EXISTING_POOL = "living"  # pooled, but only where there are such ranks: nobody is forked to tear nothing down


class CollectiveMode(Enum):
    """Whether every collective is compared between the ranks before it runs.

    CHECKED costs about 2 ms for each collective at 2 ranks and grows with their number: it is
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which names a mismatch where gloo alone would hang or compute something.
    """

    CHECKED = "checked"
    TRUSTED = "trusted"


MAX_CHECKED_WORLD_SIZE = 16  # ranks; above, the check costs more than the work (256 ranks: 19.7 s against 7.1 s)


@dataclass(frozen=True)
class RankTask:
    """``function(*args)`` on every one of ``world_size`` ranks, within ``timeout`` seconds.

    Over a server that already runs, ``function`` and ``args`` travel by pickle: a module-level function whose module
    was imported before the server was forked. Pooled work of different ``pool`` names never shares ranks.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world_size: int = 1
    timeout: float = 60.0
    group: Group = Group.DEFAULT
    isolation: Isolation = Isolation.FRESH
    pool: str = ""
    collectives: CollectiveMode = CollectiveMode.TRUSTED
    serial: int = 0  # the server numbers what it is given, so that no two groups meet at one rendezvous


@dataclass(frozen=True)
class CancelRequest:
    """Asks a server to end the ranks of the work that it was given last, and to answer that with this very request."""


@dataclass(frozen=True)
class ClosePoolRequest:
    """Asks a server to end the ranks of one pool, with their world size, and to tell how they ended."""

    pool: str
    world_size: int
