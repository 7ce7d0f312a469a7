"""Ranks that a launcher started: rank 0 leads and hands out work, the others follow.

[Note: attached to torchrun]
Every process runs the same command line. Rank 0 becomes the ``Leader`` (``leader.py``): a rank server
like any other, whose ranks are there already, itself among them. It alone plans, judges and writes, so the processes
have nothing to disagree about. The others become a ``Follower``, which takes work until it is told to leave, and with
what exit status. How every rank ended its part comes from the ranks' witnesses (``witness.py``). What cannot be done
here is to replace a rank: one that hangs or dies is named, rank 0 writes what it has, and the launch is over.
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

# Keys of the board, in the order in which they are put up.
QUESTION_KEY, ANSWER_KEY, START_KEY, CLOCK_KEY = "question", "answer", "start", "clock"


@dataclass(frozen=True)
class ExitMessage:
    """The leader's last message: end with this exit status."""

    status: int


@dataclass(frozen=True)
class Assignment:
    """One piece of work with its number, its name, and the port of a store of its own (0 for none)."""

    serial: int
    task: RankTask
    title: str
    port: int = 0


class LaunchedRank:
    """One rank of a launch, from the moment it is attached; made in the main thread, before any tensor operation."""

    def __init__(
        self,
        launch: Launch,
        inherited_function: Callable[..., Any] | None = None,
        capture_files: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        """``inherited`` runs work that says ``by_inheritance``. ``captured`` are files into which output goes."""
        self.launch = launch
        self._inherited_function = inherited_function
        self._sockets_before_group: set[tuple[int, str]] = set()
        self._saved_descriptors: dict[int, int] = {}
        # A private directory of this rank, which the witness removes, also when this process is killed.
        self._scratch_dir = Path(tempfile.mkdtemp(prefix="zharness-"))
        self._stack_file = witness.get_witness_stack_path(self._scratch_dir).open("a")
        self._output_files = {name: tempfile.TemporaryFile("w+") for name in ("stdout", "stderr")}  # noqa: SIM115 - lives on
        files = {**self._output_files, **{f"{name} (captured)": file for name, file in (capture_files or {}).items()}}
        streams = {name: file.fileno() for name, file in files.items()}
        self._witness_pipe = witness.start_witness(launch, self._scratch_dir, streams)
        self.store = LaunchStore(launch, serve=launch.rank == 0)
        faulthandler.enable(file=self._stack_file)
        # A forked child's fatal error is not the rank's: in that file it would be taken for one.
        os.register_at_fork(after_in_child=partial(faulthandler.enable, file=2))
        faulthandler.register(signal.SIGUSR1, file=self._stack_file, all_threads=True)
        torch.set_num_threads(1)

    def run_assignment(self, assignment: Assignment) -> StoreChannel:
        """Do this rank's part of a piece of work; the witness puts up how it ended."""
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
        """The outcome of this rank's part; every exception but an interrupt becomes part of it."""
        work = assignment.task
        function = (
            self._inherited_function
            if work.function is inherited_function_placeholder and self._inherited_function
            else work.function
        )
        try:
            self._form_group(assignment)
            payload = pickle.dumps(function(*work.args))
            return RankOutcome(self.launch.rank, RankEnd.RETURNED, time.monotonic_ns(), payload=payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended its part
            return outcome_from_exception(self.launch.rank, error)

    def _form_group(self, assignment: Assignment) -> None:
        """Have the default group that the work asks for, over whatever interface the user's environment names."""
        work, rank = assignment.task, self.launch.rank
        level = choose_debug_level(work)
        if dist.is_initialized():
            if work.group is Group.REUSED and get_debug_level() == level:
                return
            self.destroy_group()
        self._sockets_before_group = open_sockets()
        if work.group is Group.NONE:
            return
        set_debug_level(level)
        device = rank_device(rank, work.world_size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"group/{assignment.serial}", self.store.torch_store),
            rank=rank,
            world_size=work.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def destroy_group(self) -> None:
        """Give the default group up, once every rank has ended the work."""
        if dist.is_initialized():
            with suppress(Exception):  # a group that a dead peer was in
                dist.destroy_process_group()

    def break_group(self, serial: int) -> None:
        """Give the group up while peers may wait in it: they raise "Connection closed by peer" then.

        A group that something refers to, such as a local of the frame that raised, lives on in torch; so the sockets
        that were opened since it was formed are shut down. No peer that gets on without this rank notices.
        """
        self.store.post(broken_group_key(serial), True)
        for descriptor, _ in open_sockets() - self._sockets_before_group:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()  # raises for a listening one, of which gloo expects no end
                    found.shutdown(socket.SHUT_RDWR)
        self.destroy_group()

    @contextmanager
    def _launcher_variables(self, assignment: Assignment) -> Iterator[None]:
        """The variables that launchers set, as for a launch of this work's world size."""
        size = assignment.task.world_size
        wanted = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(min(size, self.launch.local_world_size)),
            "MASTER_PORT": str(assignment.port or self.launch.port),
        }
        before = {name: os.environ[name] for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            os.environ.update(before)

    @contextmanager
    def _redirect_output(self, task: RankTask) -> Iterator[None]:
        """Keep what is printed off the report; pytest, whose tests are run by inheritance, does that by itself."""
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
        """Have standard output and error be what they were before this work; by any thread."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            saved = self._saved_descriptors.pop(number, None)
            if saved is not None:
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)

    def _read_output(self) -> Iterator[CapturedOutput]:
        for name, file in self._output_files.items():
            file.seek(0)
            text = file.read()
            if text:
                yield CapturedOutput("", name, text[-witness.OUTPUT_TAIL_BYTES :])


class Follower(LaunchedRank):
    """A rank other than 0: it does what the leader says."""

    def answer_leader(self, answer: Callable[[Any], object]) -> None:
        """Answer the leader's one question before all work, unless it leaves without one."""
        if not self.store.wait_for_keys([QUESTION_KEY], lambda _: self.store.has_keys("work/1")):
            return
        self.store.post(f"{ANSWER_KEY}/{self.launch.rank}", answer(self.store.read_value(QUESTION_KEY)))
        if self.store.wait_for_keys([START_KEY], lambda _: self.store.has_keys("work/1")):
            self.store.post(f"{CLOCK_KEY}/{self.launch.rank}", time.monotonic_ns())

    def follow(self) -> int:
        """Take work until the leader says to leave; the exit status that it says."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the witness tells of it
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
        """The next message. Meanwhile a rank that has left the work, and is waited for by peers, hangs up."""
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
    """Where a rank puts up that it has hung up on its peers."""
    return f"work/{serial}/hung"


def open_sockets() -> set[tuple[int, str]]:
    """This process's sockets: descriptor and what it links to. Linux only; elsewhere none are found."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:"):
                found.add((int(link.name), target))
    return found
