"""Processes that wait beside a program to become those which it starts with Python: torchrun's ranks, xdist's workers.

They are forked before the program has begun, thus before it has a thread, and are its own children: it asks for their
status, signals them and ends with them as with those that it would have started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from suites.warm import program
from suites.warm.orders import Order, received, send


@dataclass(frozen=True)
class Spare:
    """One that waits: its pid, and the way to it."""

    pid: int
    way: socket.socket


WAITING: list[Spare] = []


def prepare(count: int) -> None:
    """Have that many wait for the first Pythons that this process starts."""
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for way in (ours, *(spare.way for spare in WAITING)):
                way.close()  # while this process held them too, the others would not hear that the program has ended
            become(theirs)
        theirs.close()
        WAITING.append(Spare(pid, ours))
    if count:
        subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc,attr-defined]


def become(way: socket.socket) -> None:
    """What is asked for, or nothing, where the program ends without."""
    WAITING.clear()
    found = received(way)
    if found is None:
        os._exit(0)
    way.close()
    order, streams = found
    program.settle(order, streams)
    program.run(order.words)


class Popen(subprocess.Popen[Any]):
    """Starts Python in one of those that wait, while there is one; any other command as ever."""

    def _execute_child(self, args: Any, *how: Any) -> None:
        """As in subprocess. Its first fifteen arguments are the same from Python 3.10 to 3.13."""
        _, preexec, _, passed, folder, environment, _, _, shell, *pipes = how[:15]
        if not WAITING or shell or preexec or passed or args[0] != sys.executable:
            super()._execute_child(args, *how)  # type: ignore[misc]
            return
        read, _, _, write, _, errors = pipes
        new_session = bool(how[20])
        streams = [ours if ours != -1 else own for own, ours in enumerate((read, write, errors))]
        words = [os.fsdecode(word) for word in args[1:]]
        spare = WAITING.pop(0)
        surroundings = dict(os.environ if environment is None else environment)
        send(spare.way, Order(words, str(folder or os.getcwd()), surroundings, 0, new_session), streams)
        spare.way.close()
        self.pid = spare.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
