"""Form the default process group of a rank, break its connections, and form it again within one task."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from zharness.torch_private import skip_construction_log_of_ddp

# The server enforces the deadline of a task, and extends it for builds and debuggers. The time-out of collectives is
# longer than any such deadline, so that it never fires first.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
# Parts of the messages with which collectives of gloo fail because another rank is gone.
PEER_LOST_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "monitoredBarrier")


@dataclass
class ProcessGroup:
    """The default process group of this rank.

    ``make_store`` returns the rendezvous of the group that is formed for the n-th time; ranks have to agree on n.
    """

    rank: int
    world_size: int
    device: torch.device
    make_store: Callable[[int], Store]
    _times_formed: int = 0
    _sockets_before: set[tuple[int, str]] = field(default_factory=set)

    def form(self) -> None:
        """Initialize the default process group. Collective."""
        self._sockets_before = open_sockets()
        if get_debug_level() == DebugLevel.DETAIL:
            skip_construction_log_of_ddp()
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=self.make_store(self._times_formed),
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._times_formed += 1

    def break_connections(self) -> None:
        """Close this rank's connections, so that ranks that wait for it in a collective raise an error.

        Any thread may call this method. Ranks that do not wait for this rank are not affected.
        """
        shut_down_sockets(open_sockets() - self._sockets_before)

    def form_again(self) -> None:
        """Replace the default process group, and with it all groups that were made from it. Collective."""
        with suppress(Exception):  # gloo may report the broken connections
            dist.destroy_process_group()
        self.form()


def open_sockets() -> set[tuple[int, str]]:
    """Return the open sockets of this process as pairs (descriptor, ``socket:[inode]``).

    On systems other than Linux, the set is empty.
    """
    sockets = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:"):
                sockets.add((int(link.name), target))
    return sockets


def shut_down_sockets(sockets: set[tuple[int, str]]) -> None:
    """Shut down those of ``sockets`` that are connected by TCP.

    Destroying a process group is not enough to close its connections: torch keeps a group alive while anything refers
    to it, such as a local variable of the frame that raised.
    """
    for descriptor, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises for a listening socket, whose shutdown gloo does not expect
                connection.shutdown(socket.SHUT_RDWR)
