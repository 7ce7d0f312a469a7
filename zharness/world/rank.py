"""Implement the process of a rank that a rank server forked: set it up, run its tasks, and exit."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import DebugLevel, FileStore, get_debug_level, set_debug_level, set_debug_level_from_env

from zharness.device import is_gpu_requested, local_device_index, rank_device, require_reproducible_kernels
from zharness.device.cuda_errors import add_cuda_remedy
from zharness.device.gpu_memory import begin_count, read_peaks
from zharness.errors import WorldError
from zharness.raising_frame import describe_raising_frame
from zharness.torch_private import count_collectives
from zharness.world.cores import use_batch_scheduling
from zharness.world.current_rank import CurrentRank, ExchangeMismatchError, set_current_rank
from zharness.world.messages import (
    CollectiveAnnouncement,
    DeadlineHold,
    ExchangeAnswer,
    ExchangeMismatch,
    ExchangeRequest,
    ExchangeResult,
    RankNote,
    RankStatus,
    ShutdownMessage,
)
from zharness.world.orphans import die_with_parent
from zharness.world.outcome import RankEnd, RankOutcome
from zharness.world.process_group import form_process_group
from zharness.world.streams import phase_marker
from zharness.world.task import MAX_CHECKED_WORLD_SIZE, CollectiveMode, GroupMode, Isolation, RankTask

PIPE_CLOSED_STATUS = 74  # exit status of a rank whose control pipe is closed: EX_IOERR of sysexits.h
LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class RankSlot:
    """The settings of a forked rank: number, world size, process id of its server, and scratch directory.

    All ranks that were forked together share the scratch directory.
    """

    rank: int
    world_size: int
    scratch_dir: Path
    server_pid: int


@dataclass(frozen=True)
class RankPipes:
    """A rank's ends of its pipes to the server: the control pipe, and the descriptors for standard output and error."""

    control: Connection
    out: int
    err: int


def get_stack_path(scratch_dir: Path, rank: int) -> Path:
    """Return the path of the file into which ``rank`` writes its stacks when it receives SIGUSR1."""
    return scratch_dir / f"stack.{rank}"


class ServerChannel:
    """The connection of a rank to its rank server.

    Any thread may send messages; only the thread that runs the task may receive them.
    """

    def __init__(self, slot: RankSlot, pipes: RankPipes) -> None:
        self._slot = slot
        self._pipes = pipes
        self._lock = threading.Lock()
        self._announcement_count = 0
        self._exchange_count = 0
        self._pid = os.getpid()

    def send(self, message: object) -> None:
        """Send a message to the server. If this process is a forked child of the rank, end the process instead."""
        if os.getpid() != self._pid:
            # A child that a test forked and that returned from the test would report as if it were its parent.
            os.write(2, b"a forked child of a rank returned from the test; it was ended\n")
            os._exit(70)
        with self._lock:
            self._pipes.control.send(message)

    def receive(self) -> Any:
        """Wait for the next message of the server, and return the message."""
        return self._pipes.control.recv()

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Send a note, which is a report before the end of the task. The method pickles ``payload``."""
        self.send(RankNote(self._slot.rank, at_ns, status, pickle.dumps(payload)))

    def hold(self, reason: str) -> None:
        """Suspend the deadline because this rank is in a debugger, or resume the deadline if ``reason`` is empty."""
        self.send(DeadlineHold(self._slot.rank, reason))

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """Exchange ``value`` with the other ranks through the server; see ``RankChannel.exchange``."""
        self._exchange_count += 1
        self.send(ExchangeRequest(self._slot.rank, self._exchange_count, operation, call_site, value))
        while True:
            answer = self.receive()
            if not isinstance(answer, ExchangeAnswer):
                raise WorldError(f"expected the answer to an exchange from the rank server, but got {answer!r}")
            if answer.ordinal < self._exchange_count:
                continue  # the answer to an exchange that an exception interrupted, such as one of a signal handler
            if isinstance(answer, ExchangeResult):
                return answer.values
            raise (
                ExchangeMismatchError(answer.reason)
                if isinstance(answer, ExchangeMismatch)
                else WorldError(answer.reason)
            )

    def receive_task(self) -> RankTask | ShutdownMessage:
        """Return the next task or the shutdown message of the server; ignore answers to an interrupted exchange."""
        while isinstance(message := self.receive(), ExchangeAnswer):
            continue
        assert isinstance(message, (RankTask, ShutdownMessage)), (
            f"expected a task from the rank server, got {message!r}"
        )
        return message

    def announce(self, operation: str, call_site: str) -> None:
        """Report the next collective of this rank to the server; see ``RankChannel.announce``."""
        self._announcement_count += 1
        self.send(
            CollectiveAnnouncement(self._slot.rank, self._announcement_count, time.monotonic_ns(), operation, call_site)
        )

    def reset_announcement_count(self) -> None:
        """Reset the number of announced collectives, so that the next collective has the number 1."""
        self._announcement_count = 0

    def label(self, phase: str) -> None:
        """Write a marker into both output streams; the server assigns the output that follows to ``phase``."""
        flush_streams()
        for stream in (self._pipes.out, self._pipes.err):
            try:
                os.write(stream, phase_marker(phase))
            except OSError:
                continue  # the test closed the stream, so nothing can be printed there


def run_rank(
    slot: RankSlot, pipes: RankPipes, task: RankTask, inherited_function: Callable[..., Any] | None
) -> NoReturn:
    """Set up this forked process as a rank, and run ``task`` and all further tasks until the shutdown message.

    ``inherited_function`` replaces ``inherited_function_placeholder`` in tasks. This function never returns.
    """
    os.setpgid(0, 0)  # so that children that the rank leaves behind can be killed with its process group
    die_with_parent(slot.server_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork inherited the server's handler
    atexit._clear()  # the parent runs its own exit functions; this has no public API
    redirect_streams(pipes)
    channel = ServerChannel(slot, pipes)
    set_current_rank(CurrentRank(slot.rank, slot.world_size, channel, slot.scratch_dir))
    torch.set_num_threads(1)
    require_reproducible_kernels()
    if not is_gpu_requested():
        use_batch_scheduling()
    try:
        stacks = get_stack_path(slot.scratch_dir, slot.rank).open("a")
    except FileNotFoundError:
        os._exit(1)  # the server was closed, and removed the scratch directory, while this rank was being forked
    # Use a duplicate, so that a fatal error is still reported if a test redirects descriptor 2.
    faulthandler.enable(file=os.dup(pipes.err))
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    set_launcher_variables(slot)
    while True:
        stacks.truncate(0)
        channel.reset_announcement_count()
        outcome = run_task(task, slot, inherited_function)
        try:
            channel.send(outcome)
            message = channel.receive_task()
        except (OSError, EOFError):
            os._exit(PIPE_CLOSED_STATUS)
        if isinstance(message, ShutdownMessage):
            exit_rank()
        task = message


def exit_rank() -> NoReturn:
    """Destroy the process group, run the registered exit functions and exit with status 0."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(0)


def flush_streams() -> None:
    """Flush sys.stdout and sys.stderr; ignore a stream that a test has closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by a test, or replaced by something else
            continue


def redirect_streams(pipes: RankPipes) -> None:
    """Redirect file descriptors 1 and 2 into the rank's pipes, so that the pipes also receive the output of C code."""
    flush_streams()
    os.dup2(pipes.out, 1)
    os.dup2(pipes.err, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def run_task(task: RankTask, slot: RankSlot, inherited_function: Callable[..., Any] | None) -> RankOutcome:
    """Run a task on this rank and return the outcome, which includes any exception that was raised, even SystemExit."""
    modules_before, cpu_before = len(sys.modules), time.process_time()
    begin_count()
    collectives_before: Mapping[Any, int] = {}
    try:
        form_group(task, slot)
        if task.isolation is Isolation.POOLED_AFTER_ERRORS:
            collectives_before = count_collectives()
        function = (
            inherited_function
            if task.function is inherited_function_placeholder and inherited_function is not None
            else task.function
        )
        value = function(*task.args)
        payload = pickle.dumps(value)
        return RankOutcome(
            slot.rank,
            RankEnd.RETURNED,
            time.monotonic_ns(),
            payload=payload,
            imported_modules=find_new_torch_modules(modules_before),
            cpu_seconds=time.process_time() - cpu_before,
            gpu_memory=read_peaks(),
        )
    except BaseException as error:  # noqa: BLE001 - a rank reports every exception that ended it
        outcome = outcome_from_exception(slot.rank, error)
        if task.isolation is not Isolation.POOLED_AFTER_ERRORS:
            return outcome
        counts = {key: count - collectives_before.get(key, 0) for key, count in count_collectives().items()}
        return replace(outcome, collective_counts=counts)


def find_new_torch_modules(modules_before: int) -> tuple[str, ...]:
    """Return the names of the modules of torch that were imported after the first ``modules_before`` modules.

    The list is incomplete if the task removed modules; then later ranks import the missing modules themselves. The
    names of all modules are not compared, because this would take a large part of the time of a short task, and most
    tasks import nothing.
    """
    return tuple(name for name in list(sys.modules)[modules_before:] if name.startswith("torch."))


def inherited_function_placeholder() -> None:
    """Do nothing; in a task, this function is a placeholder for the function that the server inherited by its fork.

    The ranks replace the placeholder by the inherited function, which therefore is never pickled.
    """


def outcome_from_exception(rank: int, error: BaseException) -> RankOutcome:
    """Return the outcome of a rank whose function raised ``error``.

    The outcome contains the exception as strings, so that it can be pickled.
    """
    at_ns = time.monotonic_ns()
    frames = traceback.extract_tb(error.__traceback__)
    message = add_cuda_remedy(str(error).strip()) or "(no message)"
    return RankOutcome(
        rank,
        RankEnd.RAISED,
        at_ns,
        cause=f"{type(error).__name__}: {message}",
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        innermost_file=frames[-1].filename if frames else "",
        raising_frame=describe_raising_frame(frames),
        traceback="".join(traceback.format_exception(error)),
    )


def set_launcher_variables(slot: RankSlot) -> None:
    """Set the environment variables that torchrun would set, and make gloo use the loopback interface."""
    os.environ.update(
        RANK=str(slot.rank),
        LOCAL_RANK=str(local_device_index(slot.rank)),
        WORLD_SIZE=str(slot.world_size),
        LOCAL_WORLD_SIZE=str(slot.world_size),
        LOCAL_SIZE=str(slot.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        GLOO_SOCKET_IFNAME=LOOPBACK_INTERFACES.get(sys.platform, "lo"),
    )


def form_group(task: RankTask, slot: RankSlot) -> None:
    """Give this rank the default process group that ``task`` requires: a new one, the previous task's, or none.

    The previous task's group is destroyed unless it is reused. Destroying the group does not block, because every rank
    has ended the previous task.
    """
    if task.isolation is Isolation.EXISTING_POOL:
        return  # the task tears down fixtures: it runs with the group that the rank has, even if ranks differ
    level = choose_debug_level(task)
    if dist.is_initialized():
        can_reuse = dist.get_world_size() == slot.world_size and get_debug_level() == level
        if task.group is GroupMode.REUSED and can_reuse:
            return
        dist.destroy_process_group()
    if task.group is GroupMode.NONE:
        return
    set_debug_level(level)
    store = FileStore(str(slot.scratch_dir / f"rendezvous.{task.serial}"), slot.world_size)
    form_process_group(slot.rank, slot.world_size, rank_device(slot.rank), store)


def choose_debug_level(task: RankTask) -> DebugLevel:
    """Return torch's debug level for a task.

    The level is the value of TORCH_DISTRIBUTED_DEBUG if that variable is set, else DETAIL if the task's collectives are
    compared across the ranks, else OFF.
    """
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        set_debug_level_from_env()
        return get_debug_level()
    is_checked = task.collectives is CollectiveMode.CHECKED and task.world_size <= MAX_CHECKED_WORLD_SIZE
    return DebugLevel.DETAIL if is_checked else DebugLevel.OFF


def seed_torch(seed: int) -> None:
    """Seed torch's random generators; if no GPU is used, seed only the CPU generator.

    ``torch.manual_seed`` is not called without a GPU, because it takes 1 ms: for every unused device type it captures a
    stack and queues a call.
    """
    if is_gpu_requested() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
