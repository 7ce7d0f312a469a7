"""Implement the ranks of a torchrun launch: rank 0, the leader, posts tasks, and all ranks run them.

[Note: attached to torchrun]
Every process runs the same command line. Rank 0 becomes the ``Leader`` (``leader.py``), a rank server whose ranks
exist already and include rank 0 itself. Only the leader plans, judges and writes the report, so the processes cannot
disagree. Every other rank becomes a ``Follower``, which runs tasks until the leader sends an exit status. The witnesses
(``witness.py``), one process for each rank, report how every rank ended its task. A rank that torchrun started cannot
be replaced. Therefore, when a rank hangs or dies, rank 0 writes a report that names this rank and contains the results
so far, and the launch is over.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
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

from zharness.device import rank_device, require_reproducible_kernels
from zharness.world import witness
from zharness.world.current_rank import CurrentRank, clear_current_rank, set_current_rank
from zharness.world.deadline import GRACE_SECONDS
from zharness.world.launch import Launch
from zharness.world.messages import ShutdownMessage
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome
from zharness.world.process_group import form_process_group, open_sockets, shut_down_sockets
from zharness.world.rank import (
    choose_debug_level,
    inherited_function_placeholder,
    outcome_from_exception,
)
from zharness.world.store import LaunchStore, StoreChannel
from zharness.world.task import GroupMode, RankTask
from zharness.world.witness import TaskStarted

# Keys of the store, in the order in which they are set.
QUESTION_KEY, ANSWER_KEY, START_KEY, CLOCK_KEY = "question", "answer", "start", "clock"


@dataclass(frozen=True)
class ExitMessage:
    """The last message of the leader to a follower: the follower has to end with the exit status ``status``."""

    status: int


@dataclass(frozen=True)
class Assignment:
    """A task that the leader posts, with its serial number and title.

    ``port`` is the port of a key-value store that serves only this task, or 0 if the task uses the launch's store.
    """

    serial: int
    task: RankTask
    title: str
    port: int = 0


class LaunchedRank:
    """One rank of a torchrun launch, with its witness process, its connection to the store and its output files.

    Create the object in the main thread before any tensor operation, because the constructor forks the witness.
    """

    def __init__(
        self,
        launch: Launch,
        inherited_function: Callable[..., Any] | None = None,
        capture_files: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        """Start the witness and connect to the store.

        ``inherited_function`` replaces ``inherited_function_placeholder`` in tasks. ``capture_files`` are further
        files to which the rank's output is written; if the rank dies, the witness reads the end of each file.
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
        require_reproducible_kernels()

    def run_assignment(self, assignment: Assignment) -> StoreChannel:
        """Run a task on this rank, and return the rank's channel for this task.

        The outcome is sent to the witness, which posts it in the store.
        """
        rank, world_size = self.launch.rank, assignment.task.world_size
        channel = StoreChannel(self.store, self._witness_pipe, assignment.serial, rank, world_size, self._scratch_dir)
        self._witness_pipe.send(TaskStarted(assignment.serial, assignment.title, assignment.task.timeout))
        set_current_rank(CurrentRank(rank, world_size, channel, self._scratch_dir))
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
        """Form the process group, run the task and return this rank's outcome.

        KeyboardInterrupt is raised. Any other exception is stored in the outcome instead.
        """
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
        """Give this rank the default process group that a task requires: a new one, the previous task's, or none.

        The user's environment variables select the network interface.
        """
        task, rank = assignment.task, self.launch.rank
        level = choose_debug_level(task)
        if dist.is_initialized():
            if task.group is GroupMode.REUSED and get_debug_level() == level:
                return
            self.destroy_group()
        self._sockets_before_group = open_sockets()
        if task.group is GroupMode.NONE:
            return
        set_debug_level(level)
        store = PrefixStore(f"group/{assignment.serial}", self.store.torch_store)
        form_process_group(rank, task.world_size, rank_device(rank), store)

    def destroy_group(self) -> None:
        """Destroy the default process group if there is one. Call this method once every rank has ended the task."""
        if dist.is_initialized():
            with suppress(Exception):  # a peer of the group may have died
                dist.destroy_process_group()

    def break_group(self, serial: int) -> None:
        """Close this rank's connections, so that ranks that wait in a collective raise "Connection closed by peer".

        ``serial`` is the number of the task. Every socket that was opened since the group was formed is shut down, also
        for a task without a group, whose test may have formed one. Ranks that do not wait for this rank are not
        affected.
        """
        self.store.post(broken_group_key(serial), True)
        shut_down_sockets(open_sockets() - self._sockets_before_group)
        self.destroy_group()

    @contextmanager
    def _launcher_variables(self, assignment: Assignment) -> Iterator[None]:
        """Context manager that sets torchrun's variables for this task's world size, and restores them on exit."""
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
        """Context manager that redirects standard output and error to files while a task runs.

        Tasks that run pytest tests are not redirected, because pytest captures their output.
        """
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
        """Undo the redirection of standard output and standard error. Any thread may call this method."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            saved = self._saved_descriptors.pop(number, None)
            if saved is not None:
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)

    def _read_output(self) -> Iterator[CapturedOutput]:
        """Yield the last part of the task's standard output and of its standard error; skip an empty stream."""
        for name, file in self._output_files.items():
            file.seek(0)
            text = file.read()
            if text:
                yield CapturedOutput("", name, text[-witness.OUTPUT_TAIL_BYTES :])


class Follower(LaunchedRank):
    """A rank of a torchrun launch other than rank 0; it runs the tasks that the leader (rank 0) posts."""

    def answer_leader(self, answer: Callable[[Any], object]) -> None:
        """Wait for the leader's question, post ``answer(question)``, and then post the time of this rank's clock.

        Call this method before the first task. If the leader posts a task before it has asked a question, the method
        returns without posting an answer.
        """
        if not self.store.wait_for_keys([QUESTION_KEY], lambda _: self.store.has_keys("work/1")):
            return
        self.store.post(f"{ANSWER_KEY}/{self.launch.rank}", answer(self.store.read_value(QUESTION_KEY)))
        if self.store.wait_for_keys([START_KEY], lambda _: self.store.has_keys("work/1")):
            self.store.post(f"{CLOCK_KEY}/{self.launch.rank}", time.monotonic_ns())

    def follow(self) -> int:
        """Run tasks until the leader's ExitMessage arrives; return the exit status in that message."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the witness reports the death
        serial, channel = 0, None
        while True:
            serial += 1
            message = self._receive_message(serial, channel)
            if isinstance(message, ExitMessage):
                self._witness_pipe.send(ShutdownMessage())
                self.destroy_group()
                return message.status
            if message.task.group is not GroupMode.REUSED:
                self.destroy_group()
            channel = self.run_assignment(message) if self.launch.rank < message.task.world_size else None

    def _receive_message(self, serial: int, channel: StoreChannel | None) -> ExitMessage | Assignment:
        """Wait for the leader's next message and return the message.

        If this rank failed or skipped its last task, and the other ranks have not finished that task after a grace
        period, break the process group, so that ranks that wait for this rank in a collective raise an exception.
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
    """Return the key under which a rank posts that it broke the process group of the task with number ``serial``."""
    return f"work/{serial}/hung"
