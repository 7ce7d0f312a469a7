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
from zharness.world.cores import finish_turns
from zharness.world.here import Here, NotTogether, become
from zharness.world.messages import Announced, Answer, Apart, Hold, Leave, Note, Standing, Vote, Votes
from zharness.world.orphans import die_with_parent
from zharness.world.outcome import End, RankOutcome
from zharness.world.streams import marker
from zharness.world.work import CHECKED_UP_TO, Collectives, Group, Isolation, Work

PIPE_CLOSED = 74  # exit status of a rank that cannot report any more: EX_IOERR of sysexits.h
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
# The deadline of a piece of work is its server's to keep: it knows of builds, and of people in a debugger. This one,
# of the collectives alone, comes only after every other.
LAST_RESORT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class Seat:
    """What makes a process this rank. ``room`` is a private directory of the group; ``server`` is a process id."""

    rank: int
    world_size: int
    room: Path
    server: int


@dataclass(frozen=True)
class Ends:
    """A rank's ends of its pipes: control, standard output, standard error."""

    control: Connection
    out: int
    err: int


def stack_file(room: Path, rank: int) -> Path:
    """Where the rank writes its stacks when it is asked with SIGUSR1."""
    return room / f"stack.{rank}"


class ServerChannel:
    """A rank's line to its server. Only the thread that runs the work may wait on it; any thread may tell."""

    def __init__(self, seat: Seat, ends: Ends) -> None:
        self._seat = seat
        self._ends = ends
        self._lock = threading.Lock()
        self._announced = 0
        self._exchanged = 0
        self._pid = os.getpid()

    def send(self, message: object) -> None:
        if os.getpid() != self._pid:
            # A child that a test forked and let return would speak for its parent, and end with its verdict.
            os.write(2, b"a forked child of a rank returned from the test; it was ended\n")
            os._exit(70)
        with self._lock:
            self._ends.control.send(message)

    def receive(self) -> Any:
        return self._ends.control.recv()

    def note(self, standing: Standing, payload: object, at_ns: int) -> None:
        """Tell something before the end of the work; ``payload`` is pickled."""
        self.send(Note(self._seat.rank, at_ns, standing, pickle.dumps(payload)))

    def hold(self, reason: str) -> None:
        """Switch the deadline off while a person looks at this rank; with the empty reason, on again."""
        self.send(Hold(self._seat.rank, reason))

    def exchange(self, value: bytes, what: str, site: str) -> tuple[bytes, ...]:
        self._exchanged += 1
        self.send(Vote(self._seat.rank, self._exchanged, what, site, value))
        while True:
            answer = self.receive()
            if not isinstance(answer, Answer):
                raise WorldError(f"the exchange was answered with {answer!r}")
            if answer.ordinal < self._exchanged:
                continue  # to an exchange that an exception, of a signal handler say, had ended on this side
            if isinstance(answer, Votes):
                return answer.values
            raise NotTogether(answer.reason) if isinstance(answer, Apart) else WorldError(answer.reason)

    def next_order(self) -> Work | Leave:
        """What the server wants next. Answers to an exchange that an exception ended are left unread."""
        while isinstance(message := self.receive(), Answer):
            continue
        assert isinstance(message, (Work, Leave)), f"a server sends no {message!r}"
        return message

    def announce(self, what: str, site: str) -> None:
        self._announced += 1
        self.send(Announced(self._seat.rank, self._announced, time.monotonic_ns(), what, site))

    def begin(self) -> None:
        """Count announced collectives from 1 again."""
        self._announced = 0

    def label(self, phase: str) -> None:
        """Let what is printed from now on belong to ``phase``."""
        flush()
        for stream in (self._ends.out, self._ends.err):
            try:
                os.write(stream, marker(phase))
            except OSError:
                continue  # the test closed it; there is nothing left to be labelled


def live(seat: Seat, ends: Ends, work: Work, inherited: Callable[..., Any] | None) -> NoReturn:
    """Run ``work``, then whatever else the server sends, until it says to leave. Never returns."""
    os.setpgid(0, 0)  # children that the rank leaves behind are killed with its process group
    die_with_parent(seat.server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's own handler came along with the fork
    atexit._clear()  # what the parent registered is the parent's to run  # no public way; nothing breaks if it goes
    redirect(ends)
    channel = ServerChannel(seat, ends)
    become(Here(seat.rank, seat.world_size, channel))
    torch.set_num_threads(1)
    if not gpus_asked_for():
        finish_turns()
    try:
        stacks = stack_file(seat.room, seat.rank).open("a")
    except FileNotFoundError:
        os._exit(1)  # the server was told to leave, and took the room with it, while this rank was being forked
    faulthandler.enable(
        file=os.dup(ends.err)
    )  # a copy, so that a test that redirects descriptor 2 still tells its death
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    announce_environment(seat)
    while True:
        stacks.truncate(0)
        channel.begin()
        outcome = attempt(work, seat, inherited)
        try:
            channel.send(outcome)
            message = channel.next_order()
        except (OSError, EOFError):
            os._exit(PIPE_CLOSED)
        if isinstance(message, Leave):
            leave()
        work = message


def leave() -> NoReturn:
    """End with status 0, having run what was registered to run at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    flush()
    os._exit(0)


def flush() -> None:
    """Empty Python's own buffers; streams that a test closed have none."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by a test, or replaced by something else
            continue


def redirect(ends: Ends) -> None:
    """Send file descriptors 1 and 2, C code's output included, into the rank's pipes."""
    flush()
    os.dup2(ends.out, 1)
    os.dup2(ends.err, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def attempt(work: Work, seat: Seat, inherited: Callable[..., Any] | None) -> RankOutcome:
    """The outcome of ``work`` on this rank; every exception, SystemExit included, becomes part of it."""
    loaded = set(sys.modules)
    try:
        form_group(work, seat)
        function = inherited if work.function is by_inheritance and inherited is not None else work.function
        value = function(*work.args)
        payload = pickle.dumps(value)
        return RankOutcome(
            seat.rank, End.RETURNED, time.monotonic_ns(), payload=payload, imported=imported_since(loaded)
        )
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended it, and nothing is swallowed
        return raised(seat.rank, error)


def imported_since(loaded: set[str]) -> tuple[str, ...]:
    """torch's modules that are not among those ``loaded``."""
    return tuple(name for name in list(sys.modules) if name not in loaded and name.startswith("torch."))


def by_inheritance() -> None:
    """Stands in a message for the function that the server got by its fork."""


def raised(rank: int, error: BaseException) -> RankOutcome:
    """The outcome of a rank whose function raised; made of strings only, so it can always be sent."""
    at_ns = time.monotonic_ns()
    frames = traceback.extract_tb(error.__traceback__)
    message = str(error).strip() or "(no message)"
    return RankOutcome(
        rank,
        End.RAISED,
        at_ns,
        cause=f"{type(error).__name__}: {message}",
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        innermost=frames[-1].filename if frames else "",
        traceback="".join(traceback.format_exception(error)),
    )


def announce_environment(seat: Seat) -> None:
    """Set the variables that launchers set."""
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_WORLD_SIZE=str(seat.world_size),
        LOCAL_SIZE=str(seat.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        GLOO_SOCKET_IFNAME=LOOPBACK.get(sys.platform, "lo"),
    )


def form_group(work: Work, seat: Seat) -> None:
    """Have the default group that ``work`` asks for, over the loopback interface; the one of the work before is left.

    Every rank has ended the work before, so nobody is waited for that has still to leave.
    """
    if work.isolation is Isolation.LIVING:
        return  # tearing down: what is there is there, also where it differs between the ranks
    level = debug_level(work)
    if dist.is_initialized():
        same = dist.get_world_size() == seat.world_size and get_debug_level() == level
        if work.group is Group.KEPT and same:
            return
        dist.destroy_process_group()
    if work.group is Group.NONE:
        return
    set_debug_level(level)
    device = rank_device(seat.rank, seat.world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(seat.room / f"rendezvous.{work.serial}"), seat.world_size),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=LAST_RESORT,
        device_id=device if device.type == "cuda" else None,
    )


def debug_level(work: Work) -> DebugLevel:
    """At which the group that ``work`` asks for is formed: the user's variable's, else with all checks or none."""
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        set_debug_level_from_env()
        return get_debug_level()
    checked = work.collectives is Collectives.CHECKED and work.world_size <= CHECKED_UP_TO
    return DebugLevel.DETAIL if checked else DebugLevel.OFF


def gpus_asked_for() -> bool:
    """Whether ranks are to run on GPUs; asks without touching any."""
    return os.environ.get("ZHARNESS_DEVICE", "cpu") == "cuda"


def seed_torch(number: int) -> None:
    """Seed torch's generators: on CPUs that of the CPU alone, as ranks there use no other device.

    torch.manual_seed also queues a call for each kind of device that is not in use, and its stack: a millisecond.
    """
    if gpus_asked_for() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def rank_device(rank: int, world_size: int) -> torch.device:
    """A GPU of its own for every rank where ``ZHARNESS_DEVICE=cuda`` asks for it, else the CPU.

    Asked for by name, because whether CUDA may be touched is decided before a process forks.
    """
    if not gpus_asked_for():
        return torch.device("cpu")
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device
