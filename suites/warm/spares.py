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
from suites.warm.program_request import ProgramRequest, receive_request, send_request


@dataclass(frozen=True)
class SpareProcess:
    """One that waits: its pid, and the way to it."""

    pid: int
    channel: socket.socket


WAITING_SPARES: list[SpareProcess] = []


def fork_spares(count: int) -> None:
    """Have that many wait for the first Pythons that this process starts."""
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for way in (ours, *(spare.channel for spare in WAITING_SPARES)):
                way.close()  # while this process held them too, the others would not hear that the program has ended
            run_as_spare(theirs)
        theirs.close()
        WAITING_SPARES.append(SpareProcess(pid, ours))
    if count:
        subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc,attr-defined]


def run_as_spare(channel: socket.socket) -> None:
    """What is asked for, or nothing, where the program ends without."""
    WAITING_SPARES.clear()
    found = receive_request(channel)
    if found is None:
        os._exit(0)
    channel.close()
    order, streams = found
    program.set_up_process(order, streams)
    program.run_command(order.arguments)


class Popen(subprocess.Popen[Any]):
    """Starts Python in one of those that wait, while there is one; any other command as ever."""

    def _execute_child(self, args: Any, *how: Any) -> None:
        given = dict(zip(EXECUTE_CHILD_PARAMETERS, (args, *how), strict=True))
        if not WAITING_SPARES or not can_run_in_spare(given):
            super()._execute_child(args, *how)  # type: ignore[misc]
            return
        asked = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [theirs if theirs != -1 else own for own, theirs in enumerate(asked)]
        words = [os.fsdecode(word) for word in args[1:]]
        spare = WAITING_SPARES.pop(0)
        surroundings = dict(os.environ if given["env"] is None else given["env"])
        folder = os.fspath(given["cwd"] or os.getcwd())
        send_request(
            spare.channel, ProgramRequest(words, folder, surroundings, 0, bool(given["start_new_session"])), streams
        )
        spare.channel.close()
        self.pid = spare.pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPE_PARAMETERS))  # type: ignore[attr-defined]


EXECUTE_CHILD_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPE_PARAMETERS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def can_run_in_spare(popen_arguments: Mapping[str, Any]) -> bool:
    """Whether this starts Python, on a module, a text or a file, and asks for nothing that a spare could not do."""
    args = popen_arguments["args"]
    if (
        popen_arguments["shell"]
        or popen_arguments["executable"] is not None
        or popen_arguments["preexec_fn"] is not None
        or popen_arguments["pass_fds"]
    ):
        return False
    another = [popen_arguments.get(name) for name in ("uid", "gid", "gids")] != [None] * 3
    if another or popen_arguments["umask"] != -1 or popen_arguments.get("process_group", -1) != -1:
        return False
    words = [] if isinstance(args, (str, bytes)) else [os.fsdecode(word) for word in args]
    return (
        len(words) > 1 and words[0] == sys.executable and (words[1] in PYTHON_OPTIONS or not words[1].startswith("-"))
    )


PYTHON_OPTIONS = ("-u", "-m", "-c")  # of Python's options, what ``program.run`` knows
