"""A Python that has imported what the tests' programs need, and forks one of itself for each: run as a program.

An order comes over the socket that is its standard input: the words of a command, where and with which environment it
is to run, and with them four descriptors: its standard input, output and error, and a line over which its pid and, once
it has ended, its status are told. What runs is a process with a session, a pid and signals of its own, and its streams
are those that came. Only Python has not been started anew.
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

import pytest  # noqa: F401 - what is ordered is a session of it mostly
import torch._dynamo  # torch.optim imports it at the first step: here once, else two seconds in every rank
import torch.distributed.launcher.api  # noqa: F401 - half of a session's beginning, and all of torchrun's agent

from suites.warm import program, spares
from suites.warm.program_request import ProgramRequest, find_descendants, receive_request

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def supervise_program(request: ProgramRequest, streams: Sequence[int], status_socket: socket.socket) -> None:
    """Run it in a process of its own, tell how it ended, and stay until nobody asks any more what it left behind.

    What outlives the program becomes this process's own.
    """
    assert not ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "or what is left behind is not found"
    pid = os.fork()
    if pid == 0:
        status_socket.close()
        program.set_up_process(request, streams)
        spares.fork_spares(request.spares)
        program.run_command(request.arguments)
    for descriptor in streams:
        os.close(descriptor)
    os.setsid()  # what ends the tests by their group of processes leaves this one to end the program
    ended = os.pidfd_open(pid)
    with suppress(OSError):  # of a client that is gone
        status_socket.send(f"{os.getpid()} {pid}".encode())
        select.select([ended, status_socket], [], [])
        if pid not in find_descendants(os.getpid()):
            status_socket.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            status_socket.recv(1)
    while pids := find_descendants(os.getpid()):  # those of a client that is gone: others end theirs
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Until nobody is left to order anything."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to handle; programs hear it again
    way = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # else every fork held the way, and an order would wait there for a dead server
    gc.freeze()  # pytest collects garbage five times at its end, which looks at all that torch is made of
    while (found := receive_request(way)) is not None:
        order, (*streams, line) = found
        if os.fork() == 0:
            way.close()
            supervise_program(order, streams, socket.socket(fileno=line))
        for descriptor in (*streams, line):
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


if __name__ == "__main__":
    main()
