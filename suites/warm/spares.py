"""Processes that wait beside a program to become those which it starts with Python: torchrun's ranks, xdist's workers.

They are forked before the program has begun, thus before it has a thread, and are its own children: it asks for their
status, signals them and ends with them as with those that it would have started.
"""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
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
        given = dict(zip(TOLD, (args, *how), strict=True))
        if not WAITING or not plain(given):
            super()._execute_child(args, *how)  # type: ignore[misc]
            return
        asked = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [theirs if theirs != -1 else own for own, theirs in enumerate(asked)]
        words = [os.fsdecode(word) for word in args[1:]]
        spare = WAITING.pop(0)
        surroundings = dict(os.environ if given["env"] is None else given["env"])
        folder = os.fspath(given["cwd"] or os.getcwd())
        send(spare.way, Order(words, folder, surroundings, 0, bool(given["start_new_session"])), streams)
        spare.way.close()
        self.pid = spare.pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


TOLD = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def plain(given: Mapping[str, Any]) -> bool:
    """Whether this starts Python, on a module, a text or a file, and asks for nothing that a spare could not do."""
    args = given["args"]
    if given["shell"] or given["executable"] is not None or given["preexec_fn"] is not None or given["pass_fds"]:
        return False
    another = [given.get(name) for name in ("uid", "gid", "gids")] != [None] * 3
    if another or given["umask"] != -1 or given.get("process_group", -1) != -1:
        return False
    words = [] if isinstance(args, (str, bytes)) else [os.fsdecode(word) for word in args]
    return len(words) > 1 and words[0] == sys.executable and (words[1] in PROGRAMS or not words[1].startswith("-"))


PROGRAMS = ("-u", "-m", "-c")  # of Python's options, what ``program.run`` knows
