"""Implement the witness: a process that watches one rank of a torchrun launch and reports how the rank ended.

[Note: witnesses]
torchrun's agents start and watch the ranks of a launch, but do not report to rank 0 how a rank ended. So each rank
forks a witness before it does anything else. Through a pipe, the rank reports to its witness the beginning of each
task, its notes and its outcomes; the witness posts the outcomes in the launch's store, where rank 0 reads them. When
the rank dies, the witness wakes up immediately and reads the rank's signal or exit status from /proc. When a task
exceeds its time-out, the witness makes the rank dump its stacks by sending SIGUSR1, which works even while Python
hangs. The witness is neither a child of the rank nor in the rank's process group, so that no test and no torchrun agent
waits for the witness or kills it. The witness ends at most a few seconds after the rank.
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
from zharness.world.outcome import CapturedOutput, RankEnd, RankOutcome
from zharness.world.postmortem import FATAL_ERROR_PREFIX, add_known_cause, describe_hang
from zharness.world.process_end import is_process_alive, parse_fatal_dump, read_process_end
from zharness.world.stack_request import BUSY_DUMP_SECONDS, request_stacks, wait_for_stacks
from zharness.world.stacks import (
    find_waiting_collective,
    is_building,
    parse_main_thread,
    strip_harness_frames,
    trim_stacks,
)
from zharness.world.store import LaunchStore, pause, rank_outcome_key
from zharness.world.task_watcher import strip_fatal_dump

POLL_SECONDS = 0.25  # interval between two checks whether the launch is over
PROCESS_EXIT_SECONDS = 0.5  # time between the closing of a process's files and its end
# Time for the witnesses to post their ranks' outcomes once the launch is over: each collects stacks first.
WITNESS_REPORT_SECONDS = BUSY_DUMP_SECONDS + 5.0
FINAL_REPORT_SECONDS = WITNESS_REPORT_SECONDS + 25.0  # time for rank 0 to write its report once the launch is over
OUTPUT_TAIL_BYTES = 64 * 1024  # bytes of a rank's output, from its end
# Keys of the store: why the launch is over, and whether rank 0 has written its report.
LAUNCH_OVER_KEY, REPORT_WRITTEN_KEY = "launch_over", "report_written"


@dataclass(frozen=True)
class TaskStarted:
    """A message from a rank to its witness: the rank begins a task with this serial number and title.

    ``timeout`` is the time limit of the task in seconds.
    """

    serial: int
    title: str
    timeout: float


@dataclass(frozen=True)
class LaunchOver:
    """The reason why the launch runs no further task: a rank died or hangs, or torchrun is ending all ranks.

    ``rank`` is the rank whose process or witness posted the reason. ``is_hang`` is True if a time-out is the reason.
    """

    rank: int
    message: str
    is_hang: bool = False


@dataclass(frozen=True)
class WatchedRank:
    """The rank that a witness watches.

    ``scratch_dir`` is the rank's private directory. ``stream_descriptors`` maps the name of each output stream to the
    descriptor of an open file that contains the output.
    """

    launch: Launch
    pid: int
    scratch_dir: Path
    stream_descriptors: Mapping[str, int]


def get_witness_stack_path(scratch_dir: Path) -> Path:
    """Return the path of the file into which a rank writes its stacks on SIGUSR1 and on a fatal error."""
    return scratch_dir / "stacks"


def start_witness(launch: Launch, scratch_dir: Path, stream_descriptors: Mapping[str, int]) -> Connection:
    """Fork the witness of this process, and return the pipe to the witness."""
    ours, theirs = Pipe()
    watched = WatchedRank(launch, os.getpid(), scratch_dir, stream_descriptors)
    child = os.fork()
    if child == 0:
        # Fork twice, so that the witness is not a child of the rank: a test may count or wait for its children.
        os.setsid()
        if os.fork() == 0:
            ours.close()
            run_witness(watched, theirs)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    return ours


def run_witness(watched_rank: WatchedRank, pipe: Connection) -> NoReturn:
    """Watch the rank until its process has ended, then exit. This function never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    devnull = os.open(os.devnull, os.O_RDWR)
    stderr_descriptor = os.dup(2)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    if watched_rank.launch.rank:
        os.close(stderr_descriptor)  # a reader of torchrun's output would wait for this process to close it
        stderr_descriptor = devnull
    try:
        Witness(watched_rank, pipe, stderr_descriptor).watch_rank()
    except Exception:  # noqa: BLE001 - the store has ended, and with it the launch: the rank can only wait forever
        with suppress(ProcessLookupError):
            os.kill(watched_rank.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(watched_rank.scratch_dir, ignore_errors=True)
        os._exit(0)


class Witness:
    """Posts the outcomes of one rank in the launch's store, and kills the rank when the launch is over."""

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
        self._hold_reason = ""  # why the rank's deadline does not count, such as a debugger
        self._is_done = False
        self._started_at = self._ends_at = 0.0
        self._busy_count = -1  # last value of the counter that ranks increment while they build or are debugged

    def watch_rank(self) -> None:
        """Handle the rank's messages, its deadlines and the end of the launch, until the rank has ended."""
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
        """Wait up to ``POLL_SECONDS`` for a message or for the end of the rank; return whether the rank has ended."""
        watched = [self._pipe.fileno()] + [self._end_descriptor] * (self._end_descriptor >= 0)
        ready, _, _ = select.select(watched, [], [], POLL_SECONDS)
        return self._end_descriptor in ready

    def _receive_message(self) -> bool:
        """Receive and handle one message of the rank; return False if the rank has closed the pipe."""
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
            self._hold_reason = message.reason
            self._ends_at = time.monotonic() + (self._current_task.timeout if self._current_task is not None else 0.0)
        elif isinstance(message, RankOutcome):
            self._post_outcome(message)
        elif isinstance(message, ShutdownMessage):
            self._is_done = True
        return True

    def _post_outcome(self, outcome: RankOutcome) -> None:
        """Post the rank's outcome of the current task in the store, together with the rank's notes."""
        assert self._current_task is not None, "a rank sends an outcome only after TaskStarted"
        outcome = replace(outcome, notes=tuple(self._notes), phase=outcome.phase or self._phase)
        self._store.post(rank_outcome_key(f"work/{self._current_task.serial}", self._rank), outcome)
        self._current_task = None

    def _check_deadline(self, task: TaskStarted) -> None:
        """Extend the time-out while any rank is building or in a debugger, and end this rank after the time-out."""
        stack = self._collect_stack()
        limit = self._started_at + task.timeout + BUILD_LIMIT_SECONDS
        if self._hold_reason or (is_building(parse_main_thread(stack)) and time.monotonic() < limit):
            self._store.add_to_counter("busy")
        busy_count = self._store.add_to_counter("busy", 0)
        if busy_count != self._busy_count:
            self._busy_count = busy_count
            self._ends_at = max(self._ends_at, time.monotonic() + 2 * RECHECK_SECONDS)
        elif time.monotonic() > self._ends_at:
            message = f"{task.title} did not end within {task.timeout:g} s"
            self._end_rank(
                self._store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(self._rank, message, is_hang=True)), stack
            )
            self._is_done = True

    def _end_rank(self, launch_over: LaunchOver, stack: str = "") -> None:
        """Post the outcome of the rank's unfinished task, wait until rank 0 has written its report, and kill the rank.

        ``launch_over`` is the reason why the launch is over. ``stack`` is the rank's stack, if it is known already.
        """
        ends_at = time.monotonic() + (0.0 if launch_over.is_hang else GRACE_SECONDS)
        while (
            self._current_task is not None
            and (self._pipe.poll(max(0.0, ends_at - time.monotonic())))
            and self._receive_message()
        ):
            continue  # the rank may still send an outcome of its own
        if self._current_task is not None:
            self._post_outcome(
                self._make_unfinished_outcome(self._current_task, launch_over, stack or self._collect_stack())
            )
        if self._rank == 0:
            if not self._wait_for_end(FINAL_REPORT_SECONDS):
                self._write_to_stderr(
                    f"{launch_over.message}; rank 0 could not write its report in time", stack or self._collect_stack()
                )
        else:
            self._store.wait_for_keys([REPORT_WRITTEN_KEY], lambda spent: spent > FINAL_REPORT_SECONDS)
            self._wait_for_end(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(self._watched_rank.pid, signal.SIGKILL)

    def _wait_for_end(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the rank's process; return whether the process has ended."""
        if self._end_descriptor >= 0:
            return bool(select.select([self._end_descriptor], [], [], seconds)[0])
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and is_process_alive(self._watched_rank.pid):
            pause(0.02)
        return not is_process_alive(self._watched_rank.pid)

    def _make_unfinished_outcome(self, task: TaskStarted, launch_over: LaunchOver, stack: str) -> RankOutcome:
        """Return the outcome of a rank that will be killed.

        The outcome is HUNG if the launch is over because of a time-out, else STOPPED.
        """
        site = find_waiting_collective(parse_main_thread(stack))
        cause = describe_hang(task.timeout, stack, False) if launch_over.is_hang else ""
        end = RankEnd.HUNG if launch_over.is_hang else RankEnd.STOPPED
        return self._make_outcome(end, cause, stack=stack, site=site)

    def _make_outcome(self, end: RankEnd, cause: str, *, stack: str = "", site: str = "") -> RankOutcome:
        """Return an outcome of the rank with the current time, the rank's test phase and the rank's output."""
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
        """Return the last part of the rank's output for each stream.

        The method does not move the file position, because the rank writes at that position.
        """
        outputs = []
        for name, descriptor in self._watched_rank.stream_descriptors.items():
            size = os.fstat(descriptor).st_size
            text = os.pread(descriptor, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
            if text:
                outputs.append(CapturedOutput(self._phase, name.partition(" ")[0], text))
        return outputs

    def _collect_stack(self) -> str:
        """Make the rank dump its stacks; return the stacks without the frames that run the task."""
        before = self._read_stack_file()
        try:
            request = request_stacks(self._watched_rank.pid)
        except ProcessLookupError:
            return ""
        stacks = wait_for_stacks([request], lambda: {self._rank: self._read_stack_file()[len(before) :]}, pause)
        return trim_stacks(stacks[self._rank])

    def _read_stack_file(self) -> str:
        """Return the text of all stacks that the rank has dumped so far."""
        try:
            return get_witness_stack_path(self._watched_rank.scratch_dir).read_text(errors="replace")
        except FileNotFoundError:  # a test removed the temporary files
            return ""

    def _handle_process_end(self) -> None:
        """Handle the end of the rank's process.

        The method reads the rank's last messages. Unless the rank received the shutdown message or rank 0 has already
        written its report, the method then posts how the process ended and declares the launch to be over.
        """
        self._wait_for_end(PROCESS_EXIT_SECONDS)  # a process closes its files a moment before it has ended
        # Read at once: torchrun reaps the process within a tenth of a second, after which /proc has no exit status.
        end, cause = read_process_end(self._watched_rank.pid) or parse_fatal_dump(self._read_fatal_dump())
        while self._pipe.poll() and self._receive_message():
            continue
        if self._is_done or self._store.has_keys(REPORT_WRITTEN_KEY):
            return
        message = f"rank {self._rank} {end.value}: {cause}"
        if self._current_task is not None:
            message = f"{message}, while {self._current_task.title} ran"
            outcome = self._make_outcome(end, f"{cause}, before its function had returned")
            dump = CapturedOutput(self._phase, "stderr", self._read_fatal_dump())
            self._post_outcome(
                add_known_cause(
                    replace(outcome, captured_output=(*outcome.captured_output, strip_fatal_dump(dump))), None
                )
            )
        if self._rank == 0:
            self._write_to_stderr(f"{message}; it was the rank that writes the report", self._read_fatal_dump())
            self._store.post(REPORT_WRITTEN_KEY, True)
        else:
            pause(GRACE_SECONDS)  # the other ranks may end by themselves, each with its own error
        self._store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(self._rank, message))

    def _write_to_stderr(self, message: str, stack: str) -> None:
        """Write a message and a stack to rank 0's standard error, because rank 0 cannot write its report."""
        os.write(self._stderr_descriptor, f"\nzharness: {message}\n{strip_harness_frames(stack)}\n".encode())

    def _read_fatal_dump(self) -> str:
        """Return the stack that faulthandler wrote at a fatal error of the rank, or the empty string without one."""
        text = self._read_stack_file()
        start = text.rfind(FATAL_ERROR_PREFIX)
        return trim_stacks(text[start:]) if start >= 0 else ""
