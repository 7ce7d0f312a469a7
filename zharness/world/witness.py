"""The witness of a rank: a process beside it that tells how the rank ended when the rank cannot.

[Note: witnesses]
The ranks of torchrun are not ours to start or to watch: the agent that did so tells nobody but its user, and on other
machines nobody at all. So each rank forks a witness before it does anything else. The rank writes down a pipe what it
begins, tells and finishes, and the witness puts that up in the store for rank 0. When the rank dies, the witness sees
it in the same instant and reads signal and status in /proc; when its time is up, it has the rank write its stacks by
SIGUSR1, which works while Python is stuck. It is no child of the rank and not in its process group, so that neither a
test nor the launcher takes it for one of theirs, and it never outlives the rank by more than a few seconds.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from zharness.world.deadline import BUILD_LIMIT_SECONDS, GRACE_SECONDS, RECHECK_SECONDS
from zharness.world.launch import Launch
from zharness.world.messages import DeadlineHold, RankNote, ShutdownMessage
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome, signal_name
from zharness.world.postmortem import FATAL_ERROR_PREFIX, add_known_cause, describe_hang
from zharness.world.stacks import find_waiting_collective, is_building, parse_main_thread, strip_harness_frames
from zharness.world.store import LaunchStore, pause, rank_outcome_key
from zharness.world.task_watcher import strip_fatal_dump

POLL_SECONDS = 0.25  # seconds between two looks whether the launch is over
STACK_DUMP_SECONDS = 0.5  # seconds for a rank to write its stacks
FINAL_REPORT_SECONDS = 20.0  # seconds for rank 0 to write its report once the launch is over
OUTPUT_TAIL_BYTES = 64 * 1024  # bytes of a rank's output, from its end
PROCESS_GONE_CAUSE = "its process is gone, and its launcher knows how it ended"
LAUNCH_OVER_KEY, REPORT_WRITTEN_KEY = (
    "over",
    "told",
)  # keys of the board: why the launch is over, and that the report is written


@dataclass(frozen=True)
class TaskStarted:
    """The rank begins its part of a piece of work; ``timeout`` in seconds."""

    serial: int
    title: str
    timeout: float


@dataclass(frozen=True)
class LaunchOver:
    """Why no more work can be done: a rank is ``lost``, or hangs, or the launcher ends all."""

    rank: int
    message: str
    is_hang: bool = False


@dataclass(frozen=True)
class WatchedRank:
    """A rank as its witness knows it.

    ``room`` is its private directory, ``streams`` are descriptors of the files into which its output goes, which
    outlive it.
    """

    launch: Launch
    pid: int
    scratch_dir: Path
    stream_descriptors: Mapping[str, int]


def get_witness_stack_path(scratch_dir: Path) -> Path:
    """The file into which a rank writes its stacks when it is asked with SIGUSR1, and when it dies of a fatal error."""
    return scratch_dir / "stacks"


def start_witness(launch: Launch, scratch_dir: Path, stream_descriptors: Mapping[str, int]) -> Connection:
    """Fork the witness of this process; the end of the pipe on which to tell it."""
    ours, theirs = Pipe()
    watched = WatchedRank(launch, os.getpid(), scratch_dir, stream_descriptors)
    child = os.fork()
    if child == 0:
        # Twice, so that the witness is nobody's child: a test may count its own, and wait for all of them.
        os.setsid()
        if os.fork() == 0:
            ours.close()
            run_witness(watched, theirs)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    return ours


def run_witness(watched_rank: WatchedRank, pipe: Connection) -> NoReturn:
    """Stand by the rank until it has ended. Never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    last_resort = os.dup(2)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if watched_rank.launch.rank:
        os.close(last_resort)  # whoever reads the launcher's output to its end need not wait for this process
        last_resort = nothing
    try:
        Witness(watched_rank, pipe, last_resort).watch_rank()
    except Exception:  # noqa: BLE001 - the store is gone, and with it the launch: a rank that still runs waits in vain
        with suppress(ProcessLookupError):
            os.kill(watched_rank.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(watched_rank.scratch_dir, ignore_errors=True)
        os._exit(0)


class Witness:
    """Tells the board what becomes of one rank."""

    def __init__(self, watched_rank: WatchedRank, pipe: Connection, stderr_descriptor: int) -> None:
        self._watched_rank = watched_rank
        self._rank = watched_rank.launch.rank
        self._pipe = pipe
        self._stderr_descriptor = stderr_descriptor
        self._end_descriptor = os.pidfd_open(watched_rank.pid) if hasattr(os, "pidfd_open") else -1
        self._store = LaunchStore(watched_rank.launch)
        self._current_task: TaskStarted | None = None
        self._notes: list[RankNote] = []
        self._phase = ""
        self._is_held = False
        self._is_done = False
        self._started_at = self._ends_at = 0.0
        self._busy_count = -1  # how often any rank had said that it builds, or is looked at, when this one last asked

    def watch_rank(self) -> None:
        """Until the rank has ended, or was ended from here."""
        while not self._is_done:
            if self._has_ended():
                return self._handle_process_end()
            while self._pipe.poll():
                if not self._receive_message():
                    return self._handle_process_end()
            if self._store.has_keys(LAUNCH_OVER_KEY):
                return self._end_rank(self._store.read_value(LAUNCH_OVER_KEY))
            if self._current_task is not None and time.monotonic() > self._ends_at - RECHECK_SECONDS:
                self._check_deadline(self._current_task)
        return None

    def _has_ended(self) -> bool:
        """Whether the process has ended; waits for that, and for something to hear, but not for long."""
        watched = [self._pipe.fileno()] + [self._end_descriptor] * (self._end_descriptor >= 0)
        ready, _, _ = select.select(watched, [], [], POLL_SECONDS)
        return self._end_descriptor in ready

    def _receive_message(self) -> bool:
        """Take in one message; False at the end of the pipe."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, TaskStarted):
            self._current_task, self._notes, self._phase = message, [], ""
            self._started_at = time.monotonic()
            self._ends_at = self._started_at + message.timeout
        elif isinstance(message, RankNote):
            self._notes.append(message)
        elif isinstance(message, str):
            self._phase = message
        elif isinstance(message, DeadlineHold):
            self._is_held = bool(message.reason)
            self._ends_at = time.monotonic() + (self._current_task.timeout if self._current_task is not None else 0.0)
        elif isinstance(message, RankOutcome):
            self._post_outcome(message)
        elif isinstance(message, ShutdownMessage):
            self._is_done = True
        return True

    def _post_outcome(self, outcome: RankOutcome) -> None:
        """Put up how the rank ended the work, with all that it told."""
        assert self._current_task is not None, "nothing is finished that was not begun"
        outcome = replace(outcome, notes=tuple(self._notes), phase=outcome.phase or self._phase)
        self._store.post(rank_outcome_key(f"work/{self._current_task.serial}", self._rank), outcome)
        self._current_task = None

    def _check_deadline(self, task: TaskStarted) -> None:
        """The time is nearly up, or up: it goes on for all ranks while one of them builds or is looked at."""
        stack = self._collect_stack()
        limit = self._started_at + task.timeout + BUILD_LIMIT_SECONDS
        if self._is_held or (is_building(parse_main_thread(stack)) and time.monotonic() < limit):
            self._store.add_to_counter("busy")
        busy = self._store.add_to_counter("busy", 0)
        if busy != self._busy_count:
            self._busy_count = busy
            self._ends_at = max(self._ends_at, time.monotonic() + 2 * RECHECK_SECONDS)
        elif time.monotonic() > self._ends_at:
            words = f"no end of {task.title} within {task.timeout:g} s"
            self._end_rank(
                self._store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(self._rank, words, is_hang=True)), stack
            )
            self._is_done = True

    def _end_rank(self, launch_over: LaunchOver, stack: str = "") -> None:
        """The launch is over: tell where the rank stands, have rank 0 write its report, and end the rank."""
        until = time.monotonic() + (0.0 if launch_over.is_hang else GRACE_SECONDS)
        while (
            self._current_task is not None
            and (self._pipe.poll(max(0.0, until - time.monotonic())))
            and self._receive_message()
        ):
            continue  # it may have come to its end just now, or may yet, with words of its own
        if self._current_task is not None:
            self._post_outcome(
                self._make_unfinished_outcome(self._current_task, launch_over, stack or self._collect_stack())
            )
        if self._rank == 0:
            if not self._wait_for_end(FINAL_REPORT_SECONDS):
                self._write_to_stderr(
                    f"{launch_over.message}; rank 0 did not get to write its report", stack or self._collect_stack()
                )
        else:
            self._store.wait_for_keys([REPORT_WRITTEN_KEY], lambda spent: spent > FINAL_REPORT_SECONDS)
            self._wait_for_end(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(self._watched_rank.pid, signal.SIGKILL)

    def _wait_for_end(self, seconds: float) -> bool:
        if self._end_descriptor >= 0:
            return bool(select.select([self._end_descriptor], [], [], seconds)[0])
        until = time.monotonic() + seconds
        while time.monotonic() < until and is_process_alive(self._watched_rank.pid):
            pause(0.02)
        return not is_process_alive(self._watched_rank.pid)

    def _make_unfinished_outcome(self, task: TaskStarted, launch_over: LaunchOver, stack: str) -> RankOutcome:
        site = find_waiting_collective(parse_main_thread(stack))
        cause = describe_hang(task.timeout, stack, False) if launch_over.is_hang else ""
        end = RankEnd.HUNG if launch_over.is_hang else RankEnd.STOPPED
        return self._make_outcome(end, cause, stack=stack, site=site)

    def _make_outcome(self, end: RankEnd, cause: str, *, stack: str = "", site: str = "") -> RankOutcome:
        return RankOutcome(
            self._rank,
            end,
            time.monotonic_ns(),
            cause=cause,
            stack=stack,
            site=site,
            phase=self._phase,
            captured_output=tuple(self._read_output()),
        )

    def _read_output(self) -> list[CapturedOutput]:
        """What the rank printed in this phase. Read beside the file's position, which is the rank's."""
        found = []
        for name, descriptor in self._watched_rank.stream_descriptors.items():
            size = os.fstat(descriptor).st_size
            text = os.pread(descriptor, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
            if text:
                found.append(CapturedOutput(self._phase, name.partition(" ")[0], text))
        return found

    def _collect_stack(self) -> str:
        """The rank's stacks, down to the frame that runs the work."""
        before = self._read_stack_file()
        try:
            os.kill(self._watched_rank.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        found, until = "", time.monotonic() + STACK_DUMP_SECONDS
        while time.monotonic() < until:
            pause(0.02)
            text = self._read_stack_file()[len(before) :]
            if text and text == found:
                break
            found = text
        return trim_stacks(found)

    def _read_stack_file(self) -> str:
        try:
            return get_witness_stack_path(self._watched_rank.scratch_dir).read_text(errors="replace")
        except FileNotFoundError:  # a test has removed what it found among the temporary files
            return ""

    def _handle_process_end(self) -> None:
        """The rank's process has ended: take in what it still told, tell how it ended, and that all is over."""
        self._wait_for_end(STACK_DUMP_SECONDS)  # it closes its files a moment before it has ended
        # First, and at once: the launcher, its parent, asks ten times a second, and who asks second learns nothing.
        end, cause = read_process_end(self._watched_rank.pid) or parse_fatal_dump(self._read_fatal_dump())
        while self._pipe.poll() and self._receive_message():
            continue
        if self._is_done or self._store.has_keys(REPORT_WRITTEN_KEY):
            return
        words = f"rank {self._rank} {end.value}: {cause}"
        if self._current_task is not None:
            words = f"{words}, while {self._current_task.title} ran"
            outcome = self._make_outcome(end, f"{cause}, before its function had returned")
            dump = CapturedOutput(self._phase, "stderr", self._read_fatal_dump())
            self._post_outcome(
                add_known_cause(
                    replace(outcome, captured_output=(*outcome.captured_output, strip_fatal_dump(dump))), None
                )
            )
        if self._rank == 0:
            self._write_to_stderr(f"{words}; it was the one that writes the report", self._read_fatal_dump())
            self._store.post(REPORT_WRITTEN_KEY, True)
        else:
            pause(GRACE_SECONDS)  # the others may end by themselves, each with its own words
        self._store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(self._rank, words))

    def _write_to_stderr(self, message: str, stack: str) -> None:
        """What is left to be said of rank 0 without its report, on its standard error."""
        os.write(self._stderr_descriptor, f"\nzharness: {message}\n{strip_harness_frames(stack)}\n".encode())

    def _read_fatal_dump(self) -> str:
        """The stack that a fatal error of Python writes."""
        text = self._read_stack_file()
        at = text.rfind(FATAL_ERROR_PREFIX)
        return trim_stacks(text[at:]) if at >= 0 else ""


def read_process_end(pid: int) -> tuple[RankEnd, str] | None:
    """By which signal or with which status; None once its parent has waited for it. Linux only."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    if is_process_alive(pid):
        return RankEnd.EXITED, "it closed the pipe on which it reports, and did not end"
    if status & 0x7F == signal.SIGTERM:
        return RankEnd.STOPPED, "SIGTERM, from the launcher"
    if status & 0x7F:
        return RankEnd.SIGNALLED, signal_name(status & 0x7F)
    return RankEnd.EXITED, f"exit status {status >> 8}"


# faulthandler's words for the signals that it hears of; from 3.13 on "Floating-point".
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}


def parse_fatal_dump(dump: str) -> tuple[RankEnd, str]:
    """How a process ended that wrote ``dump`` in a fatal error, or nothing that says it."""
    said = dump.rpartition(f"{FATAL_ERROR_PREFIX}: ")[2].partition("\n")[0].replace("-", " ")
    return (
        (RankEnd.SIGNALLED, _FATAL_SIGNALS[said].name)
        if said in _FATAL_SIGNALS
        else (RankEnd.EXITED, PROCESS_GONE_CAUSE)
    )


def is_process_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# What runs a piece of work in a rank: the frames behind these are the same in every stack.
_TASK_RUNNER_FILES = (
    "/zharness/pytest_ranks/rank_protocol.py",
    "/zharness/world/launched_rank.py",
    "/zharness/world/leader.py",
)


def trim_stacks(text: str) -> str:
    """Stacks without the frames below the work, and without the threads that have no others."""
    blocks: list[list[str]] = [[]]
    below = False
    for line in text.splitlines():
        if not line.startswith("  "):
            blocks.append([])
            below = False
        below = below or any(part in line for part in _TASK_RUNNER_FILES)
        if not below:
            blocks[-1].append(line)
    return "\n".join(line for block in blocks if not is_idle_thread(block) for line in block)


def is_idle_thread(block: list[str]) -> bool:
    """Whether it is a thread that only waits, with nobody but this package behind it."""
    frames = [line for line in block if line.startswith('  File "')]
    threads = bool(block) and is_thread_header(block[0])
    return threads and all("/threading.py" in frame or "/zharness/world/store.py" in frame for frame in frames)


def is_thread_header(line: str) -> bool:
    """Whether the frames of a thread follow."""
    return line.startswith(("Thread ", "Current thread "))
