"""Life of one rank, from its fork to its end."""

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

PIPE_CLOSED_STATUS = 74  # exit status of a rank that cannot report any more: EX_IOERR of sysexits.h
LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}
# The deadline of a piece of work is its server's to keep: it knows of builds, and of people in a debugger. This one,
# of the collectives alone, comes only after every other.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class RankSlot:
    """What makes a process this rank. ``room`` is a private directory of the group; ``server`` is a process id."""

    rank: int
    world_size: int
    scratch_dir: Path
    server_pid: int


@dataclass(frozen=True)
class RankPipes:
    """A rank's ends of its pipes: control, standard output, standard error."""

    control: Connection
    out: int
    err: int


def get_stack_path(scratch_dir: Path, rank: int) -> Path:
    """Where the rank writes its stacks when it is asked with SIGUSR1."""
    return scratch_dir / f"stack.{rank}"


class ServerChannel:
    """A rank's line to its server. Only the thread that runs the work may wait on it; any thread may tell."""

    def __init__(self, slot: RankSlot, pipes: RankPipes) -> None:
        self._slot = slot
        self._pipes = pipes
        self._lock = threading.Lock()
        self._announcement_count = 0
        self._exchange_count = 0
        self._pid = os.getpid()

    def send(self, message: object) -> None:
        if os.getpid() != self._pid:
            # A child that a test forked and let return would speak for its parent, and end with its verdict.
            os.write(2, b"a forked child of a rank returned from the test; it was ended\n")
            os._exit(70)
        with self._lock:
            self._pipes.control.send(message)

    def receive(self) -> Any:
        return self._pipes.control.recv()

    def note(self, status: RankStatus, payload: object, at_ns: int) -> None:
        """Tell something before the end of the work; ``payload`` is pickled."""
        self.send(RankNote(self._slot.rank, at_ns, status, pickle.dumps(payload)))

    def hold(self, reason: str) -> None:
        """Switch the deadline off while a person looks at this rank; with the empty reason, on again."""
        self.send(DeadlineHold(self._slot.rank, reason))

    def exchange(self, value: bytes, operation: str, call_site: str) -> tuple[bytes, ...]:
        self._exchange_count += 1
        self.send(ExchangeRequest(self._slot.rank, self._exchange_count, operation, call_site, value))
        while True:
            answer = self.receive()
            if not isinstance(answer, ExchangeAnswer):
                raise WorldError(f"the exchange was answered with {answer!r}")
            if answer.ordinal < self._exchange_count:
                continue  # to an exchange that an exception, of a signal handler say, had ended on this side
            if isinstance(answer, ExchangeResult):
                return answer.values
            raise (
                ExchangeMismatchError(answer.reason)
                if isinstance(answer, ExchangeMismatch)
                else WorldError(answer.reason)
            )

    def receive_task(self) -> RankTask | ShutdownMessage:
        """What the server wants next. Answers to an exchange that an exception ended are left unread."""
        while isinstance(message := self.receive(), ExchangeAnswer):
            continue
        assert isinstance(message, (RankTask, ShutdownMessage)), f"a server sends no {message!r}"
        return message

    def announce(self, operation: str, call_site: str) -> None:
        self._announcement_count += 1
        self.send(
            CollectiveAnnouncement(self._slot.rank, self._announcement_count, time.monotonic_ns(), operation, call_site)
        )

    def reset_announcement_count(self) -> None:
        """Count announced collectives from 1 again."""
        self._announcement_count = 0

    def label(self, phase: str) -> None:
        """Let what is printed from now on belong to ``phase``."""
        flush_streams()
        for stream in (self._pipes.out, self._pipes.err):
            try:
                os.write(stream, phase_marker(phase))
            except OSError:
                continue  # the test closed it; there is nothing left to be labelled


def run_rank(
    slot: RankSlot, pipes: RankPipes, task: RankTask, inherited_function: Callable[..., Any] | None
) -> NoReturn:
    """Run ``work``, then whatever else the server sends, until it says to leave. Never returns."""
    os.setpgid(0, 0)  # children that the rank leaves behind are killed with its process group
    die_with_parent(slot.server_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's own handler came along with the fork
    atexit._clear()  # what the parent registered is the parent's to run  # no public way; nothing breaks if it goes
    redirect_streams(pipes)
    channel = ServerChannel(slot, pipes)
    set_current_rank(CurrentRank(slot.rank, slot.world_size, channel))
    torch.set_num_threads(1)
    if not is_gpu_requested():
        use_batch_scheduling()
    try:
        stacks = get_stack_path(slot.scratch_dir, slot.rank).open("a")
    except FileNotFoundError:
        os._exit(1)  # the server was told to leave, and took the room with it, while this rank was being forked
    faulthandler.enable(
        file=os.dup(pipes.err)
    )  # a copy, so that a test that redirects descriptor 2 still tells its death
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
    """End with status 0, having run what was registered to run at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(0)


def flush_streams() -> None:
    """Empty Python's own buffers; streams that a test closed have none."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by a test, or replaced by something else
            continue


def redirect_streams(pipes: RankPipes) -> None:
    """Send file descriptors 1 and 2, C code's output included, into the rank's pipes."""
    flush_streams()
    os.dup2(pipes.out, 1)
    os.dup2(pipes.err, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def run_task(task: RankTask, slot: RankSlot, inherited_function: Callable[..., Any] | None) -> RankOutcome:
    """The outcome of ``work`` on this rank; every exception, SystemExit included, becomes part of it."""
    loaded = set(sys.modules)
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
            imported_modules=find_new_torch_modules(loaded),
        )
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended it, and nothing is swallowed
        return outcome_from_exception(slot.rank, error)


def find_new_torch_modules(modules_before: set[str]) -> tuple[str, ...]:
    """torch's modules that are not among those ``loaded``."""
    return tuple(name for name in list(sys.modules) if name not in modules_before and name.startswith("torch."))


def inherited_function_placeholder() -> None:
    """Stands in a message for the function that the server got by its fork."""


def outcome_from_exception(rank: int, error: BaseException) -> RankOutcome:
    """The outcome of a rank whose function raised; made of strings only, so it can always be sent."""
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
    """Set the variables that launchers set."""
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
    """Have the default group that ``work`` asks for, over the loopback interface; the one of the work before is left.

    Every rank has ended the work before, so nobody is waited for that has still to leave.
    """
    if task.isolation is Isolation.EXISTING_POOL:
        return  # tearing down: what is there is there, also where it differs between the ranks
    level = choose_debug_level(task)
    if dist.is_initialized():
        same = dist.get_world_size() == slot.world_size and get_debug_level() == level
        if task.group is Group.REUSED and same:
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
    """At which the group that ``work`` asks for is formed: the user's variable's, else with all checks or none."""
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        set_debug_level_from_env()
        return get_debug_level()
    checked = task.collectives is CollectiveMode.CHECKED and task.world_size <= MAX_CHECKED_WORLD_SIZE
    return DebugLevel.DETAIL if checked else DebugLevel.OFF


def is_gpu_requested() -> bool:
    """Whether ranks are to run on GPUs; asks without touching any."""
    return os.environ.get("ZHARNESS_DEVICE", "cpu") == "cuda"


def seed_torch(seed: int) -> None:
    """Seed torch's generators: on CPUs that of the CPU alone, as ranks there use no other device.

    torch.manual_seed also queues a call for each kind of device that is not in use, and its stack: a millisecond.
    """
    if is_gpu_requested() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def rank_device(rank: int, world_size: int) -> torch.device:
    """A GPU of its own for every rank where ``ZHARNESS_DEVICE=cuda`` asks for it, else the CPU.

    Asked for by name, because whether CUDA may be touched is decided before a process forks.
    """
    if not is_gpu_requested():
        return torch.device("cpu")
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device
