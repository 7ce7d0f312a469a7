"""What a group of ranks is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Group(Enum):
    """Whether the ranks form a process group before their function is called."""

    DEFAULT = "default"
    NONE = "none"


@dataclass(frozen=True)
class Work:
    """``function(*args)`` on every one of ``world_size`` ranks, within ``timeout`` seconds.

    Over a server that already runs, ``function`` and ``args`` travel by pickle: a module-level function whose module
    was imported before the server was forked.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world_size: int = 1
    timeout: float = 60.0
    group: Group = Group.DEFAULT
