"""The warm Python: it has imported what the tests' programs need, and forks itself to run each of them.

A request arrives over the socket that is its standard input: arguments, folder and environment, with four descriptors:
standard input, output and error, and a socket over which it sends the program's process id and, at the end, its status.
The program has its own session, process id and signal handlers and the received streams, as a newly started Python
would have.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

import pytest  # noqa: F401 - most requests are pytest sessions
import torch._dynamo  # torch.optim imports it at the first step: once here, or two seconds in every rank
import torch.distributed.launcher.api  # noqa: F401 - torchrun's agent, and half of the start of a session

from suites.warm import program, spares
from suites.warm.program_request import ProgramRequest, find_descendants, receive_request

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def supervise_program(request: ProgramRequest, streams: Sequence[int], status_socket: socket.socket) -> None:
    """Run the program in a child, send its process id and exit status, and stay until the client closes the socket.

    This process adopts the processes that outlive the program, and kills them at the end.
    """
    assert not ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "orphans could not be found without it"
    pid = os.fork()
    if pid == 0:
        status_socket.close()
        program.set_up_process(request, streams)
        spares.fork_spares(request.spares)
        program.run_program(request.arguments)
    for descriptor in streams:
        os.close(descriptor)
    os.setsid()  # so that killing the tests' process group leaves this process to end the program
    ended = os.pidfd_open(pid)
    with suppress(OSError):  # the client may have ended
        status_socket.send(f"{os.getpid()} {pid}".encode())
        select.select([ended, status_socket], [], [])
        if pid not in find_descendants(os.getpid()):
            status_socket.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            status_socket.recv(1)
    while pids := find_descendants(os.getpid()):  # only if the client has died: else it has killed them itself
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Handle requests until the tests' process closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests handle Ctrl-C; programs restore the default handler
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)  # else forks keep the socket open, and a request to a dead server would block
    gc.freeze()  # pytest collects garbage five times at its end, each time over all objects of torch
    while (received := receive_request(channel)) is not None:
        request, (*streams, status_descriptor) = received
        if os.fork() == 0:
            channel.close()
            supervise_program(request, streams, socket.socket(fileno=status_descriptor))
        for descriptor in (*streams, status_descriptor):
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


if __name__ == "__main__":
    main()
