"""The store that all ranks of a launch can reach, and a rank's channel through it.

Everything here polls and nothing waits inside of torch: a wait in C++ hears no signal, and one that times out writes
warnings of its own.
"""

from __future__ import annotations

import datetime
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zharness.errors import WorldError, ZHarnessError
from zharness.world.agreement import apart
from zharness.world.here import NotTogether
from zharness.world.launched import Launch
from zharness.world.messages import Hold, Note, Standing

PATIENCE = datetime.timedelta(seconds=60)  # for one answer of the store's server
FASTEST, SLOWEST = 0.0005, 0.02  # seconds between two looks at the store: few at first, then fewer
LOOK_FOR_THE_GONE = 0.2  # seconds between two looks whether a peer has ended

_never = threading.Event()  # waiting for it hears signals, and is over when a test replaces time.sleep


class CollectiveMismatch(ZHarnessError):
    """Two ranks are about to call different collectives."""


def pause(seconds: float) -> None:
    """Let that much time pass."""
    _never.wait(seconds)


class Board:
    """Values under keys that every rank can read. Not to be shared by two threads: each opens its own."""

    def __init__(self, launch: Launch, *, serve: bool = False) -> None:
        """``serve`` has this process keep the store, where the launcher's agent keeps none."""
        self.store: Store = PrefixStore(f"zharness/{launch.attempt}", connect(launch, serve=serve))

    def post(self, key: str, value: object) -> None:
        """Put a value up for all."""
        self.set(key, pickle.dumps(value))

    def set(self, key: str, value: bytes) -> None:
        """``post`` for bytes."""
        self.store.set(key, value)  # type: ignore[arg-type]  # the stub knows only text

    def post_first(self, key: str, value: object) -> Any:
        """Put a value up unless there is one; the value that is there then, written by one of our own ranks."""
        there = self.store.compare_set(key, "", pickle.dumps(value))  # type: ignore[arg-type]  # as above
        return pickle.loads(there)  # noqa: S301 - see the docstring

    def read(self, key: str) -> Any:
        """The value under a key that is there. It was written by one of our own ranks."""
        return pickle.loads(self.store.get(key))  # noqa: S301 - see the docstring

    def has(self, *keys: str) -> bool:
        """Whether all the keys are there."""
        return self.store.check(list(keys))

    def count(self, key: str, by: int = 1) -> int:
        """Add to a counter; where it stands now."""
        return self.store.add(key, by)

    def drop(self, *keys: str) -> None:
        """Forget keys, so that the store does not grow with the session."""
        for key in keys:
            self.store.delete_key(key)

    def await_all(self, keys: Sequence[str], over: Callable[[float], bool] = lambda _: False) -> bool:
        """Wait for all the keys; False when ``over``, which is asked with the seconds spent, ends the waiting."""
        began, between = time.monotonic(), FASTEST
        while not self.has(*keys):
            if over(time.monotonic() - began):
                return False
            pause(between)
            between = min(2 * between, SLOWEST)
        return True


def connect(launch: Launch, *, serve: bool) -> TCPStore:
    """A connection of its own to the launch's store."""
    serve = serve and not launch.agent_store
    return TCPStore(
        launch.address, launch.port, None, serve, PATIENCE, wait_for_workers=False, multi_tenant=not launch.agent_store
    )


class StoreChannel:
    """A rank's line during one piece of work: to its peers through the board, to its own witness through a pipe.

    ``room`` is a private directory of the rank, which is removed behind it however it ends.
    """

    def __init__(self, board: Board, witness: Connection, serial: int, rank: int, world_size: int, room: Path) -> None:
        self.room = room
        self._board = board
        self._witness = witness
        self._prefix = f"work/{serial}"
        self._rank = rank
        self._world_size = world_size
        self._exchanges = 0
        self._announced = 0
        self.left = False  # whether this rank takes no further part, so that others may wait for it in vain

    def note(self, standing: Standing, payload: object, at_ns: int) -> None:
        """Tell something before the end of the work; ``payload`` is pickled."""
        self.left = self.left or standing is not Standing.FINE
        self._witness.send(Note(self._rank, at_ns, standing, pickle.dumps(payload)))

    def label(self, phase: str) -> None:
        """Say in which phase this rank is."""
        self._witness.send(phase)

    def hold(self, reason: str) -> None:
        """Switch the deadline off while a person looks at this rank; with the empty reason, on again."""
        self._witness.send(Hold(self._rank, reason))

    def exchange(self, value: bytes, what: str, site: str) -> tuple[bytes, ...]:
        """As ``Channel.exchange``."""
        self._exchanges += 1
        key = f"{self._prefix}/exchange/{self._exchanges}"
        self._board.set(f"{key}/{self._rank}", pickle.dumps((self._rank, what, site, value)))
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        while not self._board.await_all(keys, lambda spent: spent > LOOK_FOR_THE_GONE):
            gone = [rank for rank in range(self._world_size) if self._board.has(ended_key(self._prefix, rank))]
            absent = next((rank for rank in gone if not self._board.has(keys[rank])), None)
            if absent is not None:
                raise WorldError(f"rank {absent} ended before it took part in the exchange")
        given = [pickle.loads(one) for one in self._board.store.multi_get(keys)]  # noqa: S301 - written by our ranks
        # All ranks have given the value of this exchange, so all have read those of the one before.
        self._board.drop(f"{self._prefix}/exchange/{self._exchanges - 1}/{self._rank}")
        first, other = given[0], next((one for one in given if one[1] != given[0][1]), None)
        if other is not None:
            raise NotTogether(apart(first[:3], other[:3]))
        return tuple(one[3] for one in given)

    def announce(self, what: str, site: str) -> None:
        """Say which collective comes next. Raises CollectiveMismatch when a peer announced another one."""
        self._announced += 1
        key = f"{self._prefix}/collective/{self._announced}"
        mine = (self._rank, what, site)
        first = self._board.post_first(key, mine)
        if first[1] != what:
            told = ", ".join(f"rank {rank} calls {one} ({place})" for rank, one, place in sorted((first, mine)))
            raise CollectiveMismatch(f"collective {self._announced} differs: {told}")
        if self._board.count(f"{key}/seen") == self._world_size:
            self._board.drop(key, f"{key}/seen")

    def tidy(self) -> None:
        """Forget this rank's last exchange, once every peer has ended the work."""
        self._board.drop(f"{self._prefix}/exchange/{self._exchanges}/{self._rank}")


def ended_key(prefix: str, rank: int) -> str:
    """Where the witness of ``rank`` puts up how the rank ended a piece of work."""
    return f"{prefix}/ended/{rank}"
