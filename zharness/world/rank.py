"""One forked rank, from its fork to its exit."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import DebugLevel, FileStore, get_debug_level, set_debug_level, set_debug_level_from_env

from zharness.errors import WorldError
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
from zharness.world.streams import phase_marker
from zharness.world.task import MAX_CHECKED_WORLD_SIZE, CollectiveMode, Group, Isolation, RankTask

PIPE_CLOSED_STATUS = 74  # exit status of a rank whose control pipe is closed: EX_IOERR of sysexits.h
LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}
# The server enforces the deadline of a task, and extends it for builds and debuggers. The time-out of collectives is
# longer than any such deadline, so that it never fires first.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class RankSlot:
    """A rank's number, world size, scratch directory (shared by its group) and the process id of its server."""

    rank: int
    world_size: int
    scratch_dir: Path
    server_pid: int


@dataclass(frozen=True)
class RankPipes:
    """A rank's ends of its pipes: the control connection, and the descriptors of standard output and error."""

    control: Connection
    out: int
    err: int


def get_stack_path(scratch_dir: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks on SIGUSR1."""
    return scratch_dir / f"stack.{rank}"


class ServerChannel:
    """A rank's connection to its server. Any thread may send; only the thread that runs the task may receive."""

    def __init__(self, slot: RankSlot, pipes: RankPipes) -> None:
        self._slot = slot
        self._pipes = pipes
        self._lock = threading.Lock()
        self._announcement_count = 0
        self._exchange_count = 0
        self._pid = os.getpid()

    def send(self, message: object) -> None:
        """Send a message. In a forked child of the rank, end the child instead."""
        if os.getpid() != self._pid:
            # A child that a test forked and let return would report in its parent's name.
            os.write(2, b"a forked child of a rank returned from the test; it was ended\n")
            os._exit(70)
        with self._lock:
            self._pipes.control.send(message)

    def receive(self) -> Any:
        """Wait for the server's next message and return it."""
        return self._pipes.control.recv()

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Send a note before the task has ended; ``payload`` is pickled."""
        self.send(RankNote(self._slot.rank, at_ns, status, pickle.dumps(payload)))

    def hold(self, reason: str) -> None:
        """Suspend the deadline while a debugger holds this rank; with the empty reason, resume it."""
        self.send(DeadlineHold(self._slot.rank, reason))

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        """Implement ``RankChannel.exchange`` through the server."""
        self._exchange_count += 1
        self.send(ExchangeRequest(self._slot.rank, self._exchange_count, operation, call_site, value))
        while True:
            answer = self.receive()
            if not isinstance(answer, ExchangeAnswer):
                raise WorldError(f"the rank server answered an exchange with {answer!r}")
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
        """Return the server's next task or its shutdown message; drop answers to an interrupted exchange."""
        while isinstance(message := self.receive(), ExchangeAnswer):
            continue
        assert isinstance(message, (RankTask, ShutdownMessage)), f"unexpected message of the rank server: {message!r}"
        return message

    def announce(self, operation: str, call_site: str) -> None:
        """Implement ``RankChannel.announce`` through the server."""
        self._announcement_count += 1
        self.send(
            CollectiveAnnouncement(self._slot.rank, self._announcement_count, time.monotonic_ns(), operation, call_site)
        )

    def reset_announcement_count(self) -> None:
        """Restart the numbering of announced collectives at 1."""
        self._announcement_count = 0

    def label(self, phase: str) -> None:
        """Mark both output streams: what is printed from now on belongs to ``phase``."""
        flush_streams()
        for stream in (self._pipes.out, self._pipes.err):
            try:
                os.write(stream, phase_marker(phase))
            except OSError:
                continue  # the test closed the stream, so nothing can be printed there


def run_rank(
    slot: RankSlot, pipes: RankPipes, task: RankTask, inherited_function: Callable[..., Any] | None
) -> NoReturn:
    """Set up this forked process as a rank; run ``task`` and all further tasks until the shutdown. Never returns."""
    os.setpgid(0, 0)  # so that children that the rank leaves behind can be killed with its process group
    die_with_parent(slot.server_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork inherited the server's handler
    atexit._clear()  # the parent runs its own exit functions; this has no public API
    redirect_streams(pipes)
    channel = ServerChannel(slot, pipes)
    set_current_rank(CurrentRank(slot.rank, slot.world_size, channel))
    torch.set_num_threads(1)
    if not is_gpu_requested():
        use_batch_scheduling()
    try:
        stacks = get_stack_path(slot.scratch_dir, slot.rank).open("a")
    except FileNotFoundError:
        os._exit(1)  # the server was closed, and removed the scratch directory, while this rank was being forked
    # A duplicate, so that a fatal error is still reported if a test redirects descriptor 2.
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
    """Destroy the process group, run the registered exit functions and end with status 0."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(0)


def flush_streams() -> None:
    """Flush sys.stdout and sys.stderr, unless a test closed or replaced them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by a test, or replaced by something else
            continue


def redirect_streams(pipes: RankPipes) -> None:
    """Redirect file descriptors 1 and 2, including the output of C code, into the rank's pipes."""
    flush_streams()
    os.dup2(pipes.out, 1)
    os.dup2(pipes.err, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def run_task(task: RankTask, slot: RankSlot, inherited_function: Callable[..., Any] | None) -> RankOutcome:
    """Run a task on this rank and return its outcome; any exception, SystemExit included, becomes part of it."""
    modules_before = set(sys.modules)
    try:
        form_group(task, slot)
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
        )
    except BaseException as error:  # noqa: BLE001 - a rank reports every exception that ended it
        return outcome_from_exception(slot.rank, error)


def find_new_torch_modules(modules_before: set[str]) -> tuple[str, ...]:
    """Return the names of torch's loaded modules that are not in ``modules_before``."""
    return tuple(name for name in list(sys.modules) if name not in modules_before and name.startswith("torch."))


def inherited_function_placeholder() -> None:
    """Stand for the function that the server inherited by its fork, which therefore needs no pickling."""


def outcome_from_exception(rank: int, error: BaseException) -> RankOutcome:
    """Return the outcome of a rank whose function raised ``error``, which is described by strings to allow pickling."""
    at_ns = time.monotonic_ns()
    frames = traceback.extract_tb(error.__traceback__)
    message = str(error).strip() or "(no message)"
    return RankOutcome(
        rank,
        RankEnd.RAISED,
        at_ns,
        cause=f"{type(error).__name__}: {message}",
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        innermost_file=frames[-1].filename if frames else "",
        traceback="".join(traceback.format_exception(error)),
    )


def set_launcher_variables(slot: RankSlot) -> None:
    """Set the environment variables that torchrun sets."""
    os.environ.update(
        RANK=str(slot.rank),
        LOCAL_RANK=str(slot.rank),
        WORLD_SIZE=str(slot.world_size),
        LOCAL_WORLD_SIZE=str(slot.world_size),
        LOCAL_SIZE=str(slot.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        GLOO_SOCKET_IFNAME=LOOPBACK_INTERFACES.get(sys.platform, "lo"),
    )


def form_group(task: RankTask, slot: RankSlot) -> None:
    """Form the default process group that a task requires, or reuse or destroy the previous task's group.

    gloo uses the loopback interface. Every rank has ended the previous task, so destroying its group does not block.
    """
    if task.isolation is Isolation.EXISTING_POOL:
        return  # the task tears down fixtures: it runs with the group that the rank has, even if ranks differ
    level = choose_debug_level(task)
    if dist.is_initialized():
        can_reuse = dist.get_world_size() == slot.world_size and get_debug_level() == level
        if task.group is Group.REUSED and can_reuse:
            return
        dist.destroy_process_group()
    if task.group is Group.NONE:
        return
    set_debug_level(level)
    device = rank_device(slot.rank, slot.world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(slot.scratch_dir / f"rendezvous.{task.serial}"), slot.world_size),
        rank=slot.rank,
        world_size=slot.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def choose_debug_level(task: RankTask) -> DebugLevel:
    """Return torch's debug level: TORCH_DISTRIBUTED_DEBUG if set, else DETAIL if collectives are checked, else OFF."""
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        set_debug_level_from_env()
        return get_debug_level()
    is_checked = task.collectives is CollectiveMode.CHECKED and task.world_size <= MAX_CHECKED_WORLD_SIZE
    return DebugLevel.DETAIL if is_checked else DebugLevel.OFF


def is_gpu_requested() -> bool:
    """Return whether ``ZHARNESS_DEVICE`` is ``cuda``; does not initialise CUDA."""
    return os.environ.get("ZHARNESS_DEVICE", "cpu") == "cuda"


def seed_torch(seed: int) -> None:
    """Seed torch's generators; without GPUs only the CPU generator.

    torch.manual_seed also queues a call, with a captured stack, for every unused device type, which takes 1 ms.
    """
    if is_gpu_requested() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def rank_device(rank: int, world_size: int) -> torch.device:
    """Return the rank's device and make it current: with ``ZHARNESS_DEVICE=cuda`` one GPU per rank, else the CPU.

    A variable decides, because probing for GPUs before a fork would make CUDA unusable in the forked ranks.
    """
    if not is_gpu_requested():
        return torch.device("cpu")
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device
