"""Ranks that torchrun started: rank 0 leads and posts tasks, the others follow.

[Note: attached to torchrun]
Every process runs the same command line. Rank 0 becomes the ``Leader`` (``leader.py``), a rank server whose ranks
exist already and include itself. It alone plans, judges and writes the report, so the processes cannot disagree. Every
other rank becomes a ``Follower``: it runs tasks until the leader sends an exit status. The witnesses (``witness.py``)
report how every rank ended its task. A rank of torchrun cannot be replaced: when one hangs or dies, rank 0 names it,
writes the report of what has run so far, and the launch is over.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import PrefixStore, get_debug_level, set_debug_level

from zharness.world import witness
from zharness.world.current_rank import CurrentRank, clear_current_rank, set_current_rank
from zharness.world.deadline import GRACE_SECONDS
from zharness.world.launch import Launch
from zharness.world.messages import ShutdownMessage
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome
from zharness.world.rank import (
    COLLECTIVE_TIMEOUT,
    choose_debug_level,
    inherited_function_placeholder,
    outcome_from_exception,
    rank_device,
)
from zharness.world.store import LaunchStore, StoreChannel
from zharness.world.task import Group, RankTask
from zharness.world.witness import TaskStarted

# Keys of the store, in the order in which they are set.
QUESTION_KEY, ANSWER_KEY, START_KEY, CLOCK_KEY = "question", "answer", "start", "clock"


@dataclass(frozen=True)
class ExitMessage:
    """The leader's last message: end with this exit status."""

    status: int


@dataclass(frozen=True)
class Assignment:
    """One task of the launch, with its serial number and title.

    ``port`` is that of a store that serves only this task; 0 selects the launch's store.
    """

    serial: int
    task: RankTask
    title: str
    port: int = 0


class LaunchedRank:
    """One rank of a launch: its witness, its store and its output files.

    Create it in the main thread before any tensor operation: it forks the witness.
    """

    def __init__(
        self,
        launch: Launch,
        inherited_function: Callable[..., Any] | None = None,
        capture_files: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        """Start the witness and connect to the store.

        ``inherited_function`` replaces ``inherited_function_placeholder`` in tasks. ``capture_files`` are further
        files that the rank's output goes to; the witness reads the end of each file if the rank dies.
        """
        self.launch = launch
        self._inherited_function = inherited_function
        self._sockets_before_group: set[tuple[int, str]] = set()
        self._saved_descriptors: dict[int, int] = {}
        # The witness removes this directory, also if this process is killed.
        self._scratch_dir = Path(tempfile.mkdtemp(prefix="zharness-"))
        self._stack_file = witness.get_witness_stack_path(self._scratch_dir).open("a")
        self._output_files = {name: tempfile.TemporaryFile("w+") for name in ("stdout", "stderr")}  # noqa: SIM115 - open until the process ends
        files = {**self._output_files, **{f"{name} (captured)": file for name, file in (capture_files or {}).items()}}
        streams = {name: file.fileno() for name, file in files.items()}
        self._witness_pipe = witness.start_witness(launch, self._scratch_dir, streams)
        self.store = LaunchStore(launch, serve=launch.rank == 0)
        faulthandler.enable(file=self._stack_file)
        # Forked children dump fatal errors to stderr: in the rank's file, the witness would take them for the rank's.
        os.register_at_fork(after_in_child=partial(faulthandler.enable, file=2))
        faulthandler.register(signal.SIGUSR1, file=self._stack_file, all_threads=True)
        torch.set_num_threads(1)

    def run_assignment(self, assignment: Assignment) -> StoreChannel:
        """Run a task on this rank and send its outcome to the witness, which posts it. Returns the task's channel."""
        rank, world_size = self.launch.rank, assignment.task.world_size
        channel = StoreChannel(self.store, self._witness_pipe, assignment.serial, rank, world_size, self._scratch_dir)
        self._witness_pipe.send(TaskStarted(assignment.serial, assignment.title, assignment.task.timeout))
        set_current_rank(CurrentRank(rank, world_size, channel))
        try:
            with self._launcher_variables(assignment), self._redirect_output(assignment.task):
                outcome = self._attempt_assignment(assignment)
        finally:
            clear_current_rank()
        if outcome.end is RankEnd.RAISED:
            channel.has_left = True
            outcome = replace(outcome, captured_output=tuple(self._read_output()))
        self._witness_pipe.send(outcome)
        return channel

    def _attempt_assignment(self, assignment: Assignment) -> RankOutcome:
        """Form the group, run the task and return this rank's outcome; only KeyboardInterrupt is raised."""
        task = assignment.task
        function = (
            self._inherited_function
            if task.function is inherited_function_placeholder and self._inherited_function
            else task.function
        )
        try:
            self._form_group(assignment)
            payload = pickle.dumps(function(*task.args))
            return RankOutcome(self.launch.rank, RankEnd.RETURNED, time.monotonic_ns(), payload=payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a rank reports every exception that ended its task
            return outcome_from_exception(self.launch.rank, error)

    def _form_group(self, assignment: Assignment) -> None:
        """Form the default process group that a task requires; the user's environment selects the network interface."""
        task, rank = assignment.task, self.launch.rank
        level = choose_debug_level(task)
        if dist.is_initialized():
            if task.group is Group.REUSED and get_debug_level() == level:
                return
            self.destroy_group()
        self._sockets_before_group = open_sockets()
        if task.group is Group.NONE:
            return
        set_debug_level(level)
        device = rank_device(rank, task.world_size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"group/{assignment.serial}", self.store.torch_store),
            rank=rank,
            world_size=task.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def destroy_group(self) -> None:
        """Destroy the default process group, if any; call this method once every rank has ended the task."""
        if dist.is_initialized():
            with suppress(Exception):  # a peer of the group may have died
                dist.destroy_process_group()

    def break_group(self, serial: int) -> None:
        """Destroy the group while peers may wait in it, so that they raise "Connection closed by peer".

        torch keeps a group alive while anything refers to it, such as a local of the frame that raised. So every
        socket that was opened since the group was formed is shut down. Peers that do not wait for this rank are not
        disturbed.
        """
        self.store.post(broken_group_key(serial), True)
        for descriptor, _ in open_sockets() - self._sockets_before_group:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # raises for a listening socket, whose shutdown gloo does not expect
                    connection.shutdown(socket.SHUT_RDWR)
        self.destroy_group()

    @contextmanager
    def _launcher_variables(self, assignment: Assignment) -> Iterator[None]:
        """Set torchrun's environment variables as for a launch of this task's world size; restore them on exit."""
        size = assignment.task.world_size
        variables = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(min(size, self.launch.local_world_size)),
            "MASTER_PORT": str(assignment.port or self.launch.port),
        }
        before = {name: os.environ[name] for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.update(before)

    @contextmanager
    def _redirect_output(self, task: RankTask) -> Iterator[None]:
        """Redirect standard output and error to files while a task runs, except for pytest tests: pytest captures."""
        if task.function is inherited_function_placeholder:
            yield
            return
        self._saved_descriptors = {number: os.dup(number) for number in (1, 2)}
        for (number, file), stream in zip(
            enumerate(self._output_files.values(), 1), (sys.stdout, sys.stderr), strict=True
        ):
            stream.flush()
            file.truncate(0)
            file.seek(0)
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            self.undo_redirection()

    def undo_redirection(self) -> None:
        """Undo the redirection of standard output and error. Any thread may call this method."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            saved = self._saved_descriptors.pop(number, None)
            if saved is not None:
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)

    def _read_output(self) -> Iterator[CapturedOutput]:
        """Yield the end of what the task wrote to standard output and to standard error."""
        for name, file in self._output_files.items():
            file.seek(0)
            text = file.read()
            if text:
                yield CapturedOutput("", name, text[-witness.OUTPUT_TAIL_BYTES :])


class Follower(LaunchedRank):
    """A rank other than 0: it runs the tasks that the leader posts."""

    def answer_leader(self, answer: Callable[[Any], object]) -> None:
        """Wait for the leader's question, post ``answer(question)``, and then post this rank's clock.

        Call it before the first task. Returns early if the leader posts a task without asking a question.
        """
        if not self.store.wait_for_keys([QUESTION_KEY], lambda _: self.store.has_keys("work/1")):
            return
        self.store.post(f"{ANSWER_KEY}/{self.launch.rank}", answer(self.store.read_value(QUESTION_KEY)))
        if self.store.wait_for_keys([START_KEY], lambda _: self.store.has_keys("work/1")):
            self.store.post(f"{CLOCK_KEY}/{self.launch.rank}", time.monotonic_ns())

    def follow(self) -> int:
        """Run tasks until the leader's ExitMessage arrives; return its exit status."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the witness reports the death
        serial, channel = 0, None
        while True:
            serial += 1
            message = self._receive_message(serial, channel)
            if isinstance(message, ExitMessage):
                self._witness_pipe.send(ShutdownMessage())
                self.destroy_group()
                return message.status
            if message.task.group is not Group.REUSED:
                self.destroy_group()
            channel = self.run_assignment(message) if self.launch.rank < message.task.world_size else None

    def _receive_message(self, serial: int, channel: StoreChannel | None) -> ExitMessage | Assignment:
        """Wait for the next message and return it.

        If this rank failed or skipped its last task and the others have not finished it after a grace period, break the
        group, so that peers that wait in a collective raise.
        """
        key = f"work/{serial}"
        if (
            channel is not None
            and channel.has_left
            and not self.store.wait_for_keys([key], lambda spent: spent > GRACE_SECONDS)
        ):
            self.break_group(serial - 1)
        self.store.wait_for_keys([key])
        if channel is not None:
            channel.delete_last_exchange()
        message: ExitMessage | Assignment = self.store.read_value(key)
        if self.store.add_to_counter(f"{key}/read") == self.launch.world_size - 1:
            self.store.delete_keys(key, f"{key}/read")
        return message


def broken_group_key(serial: int) -> str:
    """Return the key under which a rank posts that it broke the group of task ``serial``."""
    return f"work/{serial}/hung"


def open_sockets() -> set[tuple[int, str]]:
    """Return this process's sockets as (descriptor, ``socket:[inode]``). Linux only; the empty set elsewhere."""
    sockets = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:"):
                sockets.add((int(link.name), target))
    return sockets
