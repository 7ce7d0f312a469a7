"""Spares: forks that wait to become the Python processes that a program starts, such as torchrun's ranks.

They are forked before the program begins, when it has no threads, and are its own children: it waits for them and
signals them like processes that it has started itself.
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
    """A waiting fork: its process id and the socket to it."""

    pid: int
    channel: socket.socket


WAITING_SPARES: list[SpareProcess] = []


def fork_spares(count: int) -> None:
    """Fork ``count`` spares and make subprocess.Popen use them for the first Python processes."""
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for inherited in (ours, *(spare.channel for spare in WAITING_SPARES)):
                inherited.close()  # an open duplicate would hide the end of the program from the other spares
            run_as_spare(theirs)
        theirs.close()
        WAITING_SPARES.append(SpareProcess(pid, ours))
    if count:
        subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc,attr-defined]


def run_as_spare(channel: socket.socket) -> None:
    """Wait for a request and run it; exit if the program ends without one."""
    WAITING_SPARES.clear()
    received = receive_request(channel)
    if received is None:
        os._exit(0)
    channel.close()
    request, streams = received
    program.set_up_process(request, streams)
    program.run_program(request.arguments)


class Popen(subprocess.Popen[Any]):
    """A Popen that runs Python in a spare while there is one, and any other command as usual."""

    def _execute_child(self, args: Any, *other_arguments: Any) -> None:
        arguments = dict(zip(EXECUTE_CHILD_PARAMETERS, (args, *other_arguments), strict=True))
        if not WAITING_SPARES or not can_run_in_spare(arguments):
            super()._execute_child(args, *other_arguments)  # type: ignore[misc]
            return
        pipes = [arguments[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [pipe if pipe != -1 else own for own, pipe in enumerate(pipes)]
        command = [os.fsdecode(argument) for argument in args[1:]]
        spare = WAITING_SPARES.pop(0)
        environment = dict(os.environ if arguments["env"] is None else arguments["env"])
        folder = os.fspath(arguments["cwd"] or os.getcwd())
        new_session = bool(arguments["start_new_session"])
        send_request(spare.channel, ProgramRequest(command, folder, environment, 0, new_session), streams)
        spare.channel.close()
        self.pid = spare.pid
        self._child_created = True
        self._close_pipe_fds(*(arguments[name] for name in PIPE_PARAMETERS))  # type: ignore[attr-defined]


EXECUTE_CHILD_PARAMETERS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPE_PARAMETERS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def can_run_in_spare(popen_arguments: Mapping[str, Any]) -> bool:
    """Return whether the command runs Python on a module, a text or a file, with options that a spare supports."""
    args = popen_arguments["args"]
    if (
        popen_arguments["shell"]
        or popen_arguments["executable"] is not None
        or popen_arguments["preexec_fn"] is not None
        or popen_arguments["pass_fds"]
    ):
        return False
    changes_user = [popen_arguments.get(name) for name in ("uid", "gid", "gids")] != [None] * 3
    if changes_user or popen_arguments["umask"] != -1 or popen_arguments.get("process_group", -1) != -1:
        return False
    command = [] if isinstance(args, (str, bytes)) else [os.fsdecode(argument) for argument in args]
    return (
        len(command) > 1
        and command[0] == sys.executable
        and (command[1] in PYTHON_OPTIONS or not command[1].startswith("-"))
    )


PYTHON_OPTIONS = ("-u", "-m", "-c")  # the options of Python that ``program.run_command`` supports
