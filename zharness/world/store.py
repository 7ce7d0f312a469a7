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
from zharness.world.current_rank import ExchangeMismatchError
from zharness.world.launch import Launch
from zharness.world.messages import DeadlineHold, RankNote, RankStatus
from zharness.world.rank_coordinator import describe_exchange_mismatch

STORE_TIMEOUT = datetime.timedelta(seconds=60)  # for one answer of the store's server
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.0005, 0.02  # seconds between two looks at the store: few at first, then fewer
PEER_CHECK_SECONDS = 0.2  # seconds between two looks whether a peer has ended

_never_set = threading.Event()  # waiting for it hears signals, and is over when a test replaces time.sleep


class CollectiveMismatch(ZHarnessError):
    """Two ranks are about to call different collectives."""


def pause(seconds: float) -> None:
    """Let that much time pass."""
    _never_set.wait(seconds)


class LaunchStore:
    """Values under keys that every rank can read. Not to be shared by two threads: each opens its own."""

    def __init__(self, launch: Launch, *, serve: bool = False) -> None:
        """``serve`` has this process keep the store, where the launcher's agent keeps none."""
        self.torch_store: Store = PrefixStore(f"zharness/{launch.restart_count}", connect_to_store(launch, serve=serve))

    def post(self, key: str, value: object) -> None:
        """Put a value up for all."""
        self.post_bytes(key, pickle.dumps(value))

    def post_bytes(self, key: str, value: bytes) -> None:
        """``post`` for bytes."""
        self.torch_store.set(key, value)  # type: ignore[arg-type]  # the stub knows only text

    def post_if_absent(self, key: str, value: object) -> Any:
        """Put a value up unless there is one; the value that is there then, written by one of our own ranks."""
        there = self.torch_store.compare_set(key, "", pickle.dumps(value))  # type: ignore[arg-type]  # as above
        return pickle.loads(there)  # noqa: S301 - see the docstring

    def read_value(self, key: str) -> Any:
        """The value under a key that is there. It was written by one of our own ranks."""
        return pickle.loads(self.torch_store.get(key))  # noqa: S301 - see the docstring

    def has_keys(self, *keys: str) -> bool:
        """Whether all the keys are there."""
        return self.torch_store.check(list(keys))

    def add_to_counter(self, key: str, amount: int = 1) -> int:
        """Add to a counter; where it stands now."""
        return self.torch_store.add(key, amount)

    def delete_keys(self, *keys: str) -> None:
        """Forget keys, so that the store does not grow with the session."""
        for key in keys:
            self.torch_store.delete_key(key)

    def wait_for_keys(self, keys: Sequence[str], should_stop: Callable[[float], bool] = lambda _: False) -> bool:
        """Wait for all the keys; False when ``over``, which is asked with the seconds spent, ends the waiting."""
        began, between = time.monotonic(), MIN_POLL_SECONDS
        while not self.has_keys(*keys):
            if should_stop(time.monotonic() - began):
                return False
            pause(between)
            between = min(2 * between, MAX_POLL_SECONDS)
        return True


def connect_to_store(launch: Launch, *, serve: bool) -> TCPStore:
    """A connection of its own to the launch's store."""
    serve = serve and not launch.uses_agent_store
    return TCPStore(
        launch.address,
        launch.port,
        None,
        serve,
        STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=not launch.uses_agent_store,
    )


class StoreChannel:
    """A rank's line during one piece of work: to its peers through the board, to its own witness through a pipe.

    ``room`` is a private directory of the rank, which is removed behind it however it ends.
    """

    def __init__(
        self, store: LaunchStore, witness_pipe: Connection, serial: int, rank: int, world_size: int, scratch_dir: Path
    ) -> None:
        self.scratch_dir = scratch_dir
        self._store = store
        self._witness_pipe = witness_pipe
        self._prefix = f"work/{serial}"
        self._rank = rank
        self._world_size = world_size
        self._exchange_count = 0
        self._announcement_count = 0
        self.has_left = False  # whether this rank takes no further part, so that others may wait for it in vain

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Tell something before the end of the work; ``payload`` is pickled."""
        self.has_left = self.has_left or status is not RankStatus.OK
        self._witness_pipe.send(RankNote(self._rank, at_ns, status, pickle.dumps(payload)))

    def label(self, phase: str) -> None:
        """Say in which phase this rank is."""
        self._witness_pipe.send(phase)

    def hold(self, reason: str) -> None:
        """Switch the deadline off while a person looks at this rank; with the empty reason, on again."""
        self._witness_pipe.send(DeadlineHold(self._rank, reason))

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """As ``Channel.exchange``."""
        self._exchange_count += 1
        key = f"{self._prefix}/exchange/{self._exchange_count}"
        self._store.post_bytes(f"{key}/{self._rank}", pickle.dumps((self._rank, operation, call_site, value)))
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        while not self._store.wait_for_keys(keys, lambda spent: spent > PEER_CHECK_SECONDS):
            gone = [
                rank for rank in range(self._world_size) if self._store.has_keys(rank_outcome_key(self._prefix, rank))
            ]
            absent = next((rank for rank in gone if not self._store.has_keys(keys[rank])), None)
            if absent is not None:
                raise WorldError(f"rank {absent} ended before it took part in the exchange")
        given = [pickle.loads(one) for one in self._store.torch_store.multi_get(keys)]  # noqa: S301 - written by our ranks
        # All ranks have given the value of this exchange, so all have read those of the one before.
        self._store.delete_keys(f"{self._prefix}/exchange/{self._exchange_count - 1}/{self._rank}")
        first, other = given[0], next((one for one in given if one[1] != given[0][1]), None)
        if other is not None:
            raise ExchangeMismatchError(describe_exchange_mismatch(first[:3], other[:3]))
        return tuple(one[3] for one in given)

    def announce(self, operation: str, call_site: str) -> None:
        """Say which collective comes next. Raises CollectiveMismatch when a peer announced another one."""
        self._announcement_count += 1
        key = f"{self._prefix}/collective/{self._announcement_count}"
        mine = (self._rank, operation, call_site)
        first = self._store.post_if_absent(key, mine)
        if first[1] != operation:
            told = ", ".join(f"rank {rank} calls {one} ({place})" for rank, one, place in sorted((first, mine)))
            raise CollectiveMismatch(f"collective {self._announcement_count} differs: {told}")
        if self._store.add_to_counter(f"{key}/seen") == self._world_size:
            self._store.delete_keys(key, f"{key}/seen")

    def delete_last_exchange(self) -> None:
        """Forget this rank's last exchange, once every peer has ended the work."""
        self._store.delete_keys(f"{self._prefix}/exchange/{self._exchange_count}/{self._rank}")


def rank_outcome_key(prefix: str, rank: int) -> str:
    """Where the witness of ``rank`` puts up how the rank ended a piece of work."""
    return f"{prefix}/ended/{rank}"
