"""Form the default process group of a rank, and shut down its connections."""

from __future__ import annotations

import datetime
import os
import socket
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from zharness.device import BackendName, choose_backend, read_poison
from zharness.torch_private import skip_construction_log_of_ddp
from zharness.world.staged_group import register_staged_backend

# The server enforces the deadline of a task, and extends it for builds and debuggers. The time-out of collectives is
# longer than any such deadline, so that it never fires first.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
# Parts of the messages with which collectives of gloo fail because another rank is gone.
PEER_LOST_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "monitoredBarrier")


def form_process_group(rank: int, world_size: int, device: torch.device, store: Store) -> None:
    """Initialize the default process group; the ranks meet in ``store``. Collective."""
    if get_debug_level() == DebugLevel.DETAIL:
        skip_construction_log_of_ddp()
    backend = choose_backend(world_size)
    if backend is BackendName.STAGED:
        register_staged_backend(read_poison())
    dist.init_process_group(
        backend.value,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend is BackendName.NCCL else None,
    )


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
