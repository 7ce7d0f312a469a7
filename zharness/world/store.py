"""Connect to the key-value store of a torchrun launch, and exchange values between its ranks through the store.

Every function that waits polls the store from Python, because a wait inside torch's C++ code blocks signal handlers and
prints a warning when it times out.
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
from zharness.world.rank_coordinator import describe_calls, describe_exchange_mismatch

STORE_TIMEOUT = datetime.timedelta(seconds=60)  # for one answer of the store's server
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.0005, 0.02  # the interval between two reads of the store grows from MIN to MAX
PEER_CHECK_SECONDS = 0.2  # interval between two checks whether a peer has ended

_never_set = threading.Event()  # its wait runs signal handlers, and works even if a test replaces time.sleep


class CollectiveMismatch(ZHarnessError):
    """Raised on a rank that is about to call a collective that differs from the collective of another rank."""


def pause(seconds: float) -> None:
    """Sleep for ``seconds``. Signal handlers run during the sleep."""
    _never_set.wait(seconds)


class LaunchStore:
    """A connection to the launch's key-value store, which contains pickled values that every rank can read.

    The connection is not thread-safe, so each thread has to open its own.
    """

    def __init__(self, launch: Launch, *, serve: bool = False) -> None:
        """Connect to the store. ``serve`` has the same meaning as in ``connect_to_store``."""
        self.torch_store: Store = PrefixStore(f"zharness/{launch.restart_count}", connect_to_store(launch, serve=serve))

    def post(self, key: str, value: object) -> None:
        """Pickle ``value`` and store it under ``key``."""
        self.post_bytes(key, pickle.dumps(value))

    def post_bytes(self, key: str, value: bytes) -> None:
        """Store the bytes ``value`` under ``key``."""
        self.torch_store.set(key, value)  # type: ignore[arg-type]  # the stub declares str only

    def post_if_absent(self, key: str, value: object) -> Any:
        """Store ``value`` under ``key`` unless the key exists, and return the value that the key then has.

        Unpickling the stored value is safe, because a rank of this launch wrote it.
        """
        stored = self.torch_store.compare_set(key, "", pickle.dumps(value))  # type: ignore[arg-type]  # as above
        return pickle.loads(stored)  # noqa: S301 - see the docstring

    def read_value(self, key: str) -> Any:
        """Return the value that is stored under ``key``, which has to exist.

        Unpickling the stored value is safe, because a rank of this launch wrote it.
        """
        return pickle.loads(self.torch_store.get(key))  # noqa: S301 - see the docstring

    def has_keys(self, *keys: str) -> bool:
        """Return whether all ``keys`` exist."""
        return self.torch_store.check(list(keys))

    def add_to_counter(self, key: str, amount: int = 1) -> int:
        """Add ``amount`` to the counter that is stored under ``key``, and return the new value."""
        return self.torch_store.add(key, amount)

    def delete_keys(self, *keys: str) -> None:
        """Delete ``keys`` from the store, so that the store does not grow during a test session."""
        for key in keys:
            self.torch_store.delete_key(key)

    def wait_for_keys(self, keys: Sequence[str], should_stop: Callable[[float], bool] = lambda _: False) -> bool:
        """Wait until all ``keys`` exist, and return True.

        Returns False if ``should_stop``, which is called with the seconds waited so far, returns True first.
        """
        started_at, interval = time.monotonic(), MIN_POLL_SECONDS
        while not self.has_keys(*keys):
            if should_stop(time.monotonic() - started_at):
                return False
            pause(interval)
            interval = min(2 * interval, MAX_POLL_SECONDS)
        return True


def connect_to_store(launch: Launch, *, serve: bool) -> TCPStore:
    """Return a new connection to the launch's store.

    If ``serve`` is True, this process also runs the server of the store, unless torchrun's agent runs that server.
    """
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
    """The channel of a rank of a torchrun launch during one task.

    The channel reaches the other ranks through the store, and the rank's witness through a pipe. ``serial`` is the
    serial number of the task. ``scratch_dir`` is the rank's private directory, which the witness removes.
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
        self.has_left = False  # whether this rank enters no further collective of the task: it failed or skipped

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Send the witness a note, which is a report before the end of the task. The method pickles ``payload``."""
        self.has_left = self.has_left or status in (RankStatus.FAILED, RankStatus.SKIPPED)
        self._witness_pipe.send(RankNote(self._rank, at_ns, status, pickle.dumps(payload)))

    def label(self, phase: str) -> None:
        """Report to the witness that this rank enters the test phase ``phase``."""
        self._witness_pipe.send(phase)

    def hold(self, reason: str) -> None:
        """Suspend the deadline because this rank is in a debugger, or resume the deadline if ``reason`` is empty."""
        self._witness_pipe.send(DeadlineHold(self._rank, reason))

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """Exchange ``value`` with the other ranks through the store; see ``RankChannel.exchange``."""
        self._exchange_count += 1
        key = f"{self._prefix}/exchange/{self._exchange_count}"
        self._store.post_bytes(f"{key}/{self._rank}", pickle.dumps((self._rank, operation, call_site, value)))
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        while not self._store.wait_for_keys(keys, lambda spent: spent > PEER_CHECK_SECONDS):
            ended = [
                rank for rank in range(self._world_size) if self._store.has_keys(rank_outcome_key(self._prefix, rank))
            ]
            absent = next((rank for rank in ended if not self._store.has_keys(keys[rank])), None)
            if absent is not None:
                raise WorldError(f"rank {absent} ended before it took part in the exchange")
        requests = [pickle.loads(data) for data in self._store.torch_store.multi_get(keys)]  # noqa: S301 - from our ranks
        # All ranks have posted a value for this exchange, so all have read the values of the previous exchange.
        self._store.delete_keys(f"{self._prefix}/exchange/{self._exchange_count - 1}/{self._rank}")
        first = requests[0]
        other = next((request for request in requests if request[1] != first[1]), None)
        if other is not None:
            raise ExchangeMismatchError(describe_exchange_mismatch(first[:3], other[:3]))
        return tuple(value for _, _, _, value in requests)

    def announce(self, operation: str, call_site: str) -> None:
        """Post the collective that this rank enters next. Raises CollectiveMismatch if a peer's collective differs."""
        self._announcement_count += 1
        key = f"{self._prefix}/collective/{self._announcement_count}"
        own_call = (self._rank, operation, call_site)
        first_call = self._store.post_if_absent(key, own_call)
        if first_call[1] != operation:
            calls = describe_calls(*sorted((first_call, own_call)))
            raise CollectiveMismatch(
                f"collective calls differ between ranks at call {self._announcement_count}: {calls}"
            )
        if self._store.add_to_counter(f"{key}/seen") == self._world_size:
            self._store.delete_keys(key, f"{key}/seen")

    def delete_last_exchange(self) -> None:
        """Delete this rank's last exchanged value from the store. Call this once every peer has ended the task."""
        self._store.delete_keys(f"{self._prefix}/exchange/{self._exchange_count}/{self._rank}")


def rank_outcome_key(prefix: str, rank: int) -> str:
    """Return the key under which the witness of ``rank`` posts the rank's outcome; ``prefix`` identifies the task."""
    return f"{prefix}/ended/{rank}"
