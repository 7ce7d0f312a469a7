"""Implement rank 0 of a torchrun launch: it posts tasks, collects the outcomes of all ranks, and ends the launch.

If a rank dies or hangs, rank 0 writes a report of the results so far and ends the launch early.
"""

from __future__ import annotations

import faulthandler
import operator
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but without a stub there

from zharness.errors import UsageError, WorldError
from zharness.world.deadline import GRACE_SECONDS
from zharness.world.launch import Launch
from zharness.world.launched_rank import (
    ANSWER_KEY,
    CLOCK_KEY,
    QUESTION_KEY,
    START_KEY,
    Assignment,
    ExitMessage,
    LaunchedRank,
    broken_group_key,
)
from zharness.world.messages import ShutdownMessage
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome
from zharness.world.process_end import PROCESS_GONE_CAUSE
from zharness.world.process_group import PEER_LOST_MESSAGES
from zharness.world.server import RankServer
from zharness.world.store import STORE_TIMEOUT, LaunchStore, StoreChannel, rank_outcome_key
from zharness.world.task import GroupMode, RankTask
from zharness.world.witness import (
    FINAL_REPORT_SECONDS,
    LAUNCH_OVER_KEY,
    POLL_SECONDS,
    REPORT_WRITTEN_KEY,
    WITNESS_REPORT_SECONDS,
    LaunchOver,
)

# Ends after which a rank runs no further task.
LOST_ENDS = (RankEnd.SIGNALLED, RankEnd.EXITED, RankEnd.HUNG, RankEnd.STOPPED)
ATTACH_TIMEOUT = 300.0  # seconds for every rank to collect its tests, as long as torch waits for a rendezvous
SILENCE_TIMEOUT = 30.0  # seconds beyond a task's time-out for its ranks or their witnesses to post outcomes
NO_REPORT_CAUSE = "neither the rank nor its witness reported anything; its machine may be down"

# Called with the outcome of the task that was running, or None, and the reason; returns the exit status.
FinalReportWriter = Callable[["GroupOutcome | None", str], int]


class Leader(LaunchedRank, RankServer):
    """The leader of a torchrun launch: the rank server in rank 0, whose ranks are all ranks of the launch.

    If the launch ends early, ``write_final_report(outcome, reason)`` is called, in any thread. The function has to
    write the report of the results so far and to return the exit status. ``outcome`` is the outcome of the task that
    was running, or None if no task was running. ``reason`` says why the launch ended.
    """

    def __init__(
        self,
        launch: Launch,
        write_final_report: FinalReportWriter,
        inherited_function: Callable[..., Any] | None = None,
        capture_files: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        LaunchedRank.__init__(self, launch, inherited_function, capture_files)
        self.follower_status = 3  # exit status of the followers unless the caller sets another one
        self.task_title = ""  # title of the next task, for messages
        self.is_group_broken = False  # whether a rank left the last task while its peers waited for it
        self._write_final_report = write_final_report
        self._serial = 0
        self._group_size = 0  # world size of the existing group if it can be reused
        self._current_assignment: Assignment | None = None
        self._is_guarding = True
        self._is_closed = False  # closed, or writing the final report
        # The thread that holds this lock may write the report. The main thread holds it, except while it runs a task.
        self._report_lock = threading.Lock()
        self._report_lock.acquire()
        self._clock_offsets: dict[int, int] = {}
        self._signal_reader, self._signal_writer = socket.socketpair()
        self._signal_writer.setblocking(False)
        self._guard_thread = threading.Thread(target=self._run_guard, name="zharness guard", daemon=True)

    def ask_followers(self, question: object) -> dict[int, Any]:
        """Post ``question`` in the store, and return the answers of the followers (all other ranks), by rank.

        Call this method before the first task. After the answers, every follower posts the time of its clock, so that
        times from several machines can be compared. The comparison is accurate to about 20 ms, which is less than the
        time in which a failure reaches another rank. Raises UsageError if a follower does not answer.
        """
        self.store.post(QUESTION_KEY, question)
        answers = self._collect_from_followers(
            ANSWER_KEY, f"did not attach within {ATTACH_TIMEOUT:g} s; every rank has to run the same command"
        )
        self.store.post(START_KEY, True)
        start_ns = time.monotonic_ns()
        clocks = self._collect_from_followers(CLOCK_KEY, "attached but did not report its clock; it may have ended")
        if not self.launch.is_single_machine:  # one machine has one clock
            self._clock_offsets = {rank: clock - start_ns for rank, clock in clocks.items()}
        return answers

    def _collect_from_followers(self, key: str, failure: str) -> dict[int, Any]:
        """Return the values that the followers posted under ``key``, by rank.

        Raises UsageError, with ``failure`` in the message, if a follower posts no value within ``ATTACH_TIMEOUT``.
        """
        keys = {rank: f"{key}/{rank}" for rank in range(1, self.launch.world_size)}
        if not self.store.wait_for_keys(list(keys.values()), partial(operator.lt, ATTACH_TIMEOUT)):
            missing = [str(rank) for rank, rank_key in keys.items() if not self.store.has_keys(rank_key)]
            raise UsageError(f"rank {', '.join(missing)} {failure}")
        return {rank: self.store.read_value(rank_key) for rank, rank_key in keys.items()}

    def submit(self, task: RankTask) -> GroupOutcome:
        """Run ``task`` on the first ``task.world_size`` ranks of the launch, and return the outcome.

        If a rank dies or hangs, this method does not return: it writes the final report and ends the process. Raises
        WorldError if the launch has too few ranks.
        """
        if task.world_size > self.launch.world_size:
            raise WorldError(f"world size {task.world_size} needs more ranks than the {self.launch.describe()}")
        reuses_group = task.group is GroupMode.REUSED and self._group_size == task.world_size and dist.is_initialized()
        group = task.group if reuses_group or task.group is GroupMode.NONE else GroupMode.DEFAULT
        if not reuses_group:
            self.destroy_group()
        if self._guard_thread.ident is None:  # start it as late as here: rank servers are forked before the first task
            self._start_guard()
        self._serial += 1
        assignment = Assignment(self._serial, replace(task, group=group), self.task_title or "the task")
        with open_task_store(self.launch, group) as port:
            assignment = replace(assignment, port=port)
            self._current_assignment = assignment
            self.store.post(f"work/{assignment.serial}", assignment)
            self._report_lock.release()
            try:
                channel = self.run_assignment(assignment)
                outcome = self._collect_outcomes(assignment, channel)
            finally:
                self._report_lock.acquire()  # blocks forever if the launch is over: the guard thread reports
        self._current_assignment = None
        if task.group is not GroupMode.REUSED:
            self.destroy_group()  # this process needs no process group until the next task
        self._group_size = (
            task.world_size if all(rank.is_successful for rank in outcome.ranks) and group is not GroupMode.NONE else 0
        )
        return outcome

    def close_pool(self, pool: str, world_size: int) -> GroupOutcome | None:
        """Do nothing and return None, because a torchrun launch has no rank pools: its ranks run until it ends."""
        return None

    def close(self) -> None:
        """Send every follower its exit status, and stop the guard thread.

        If a task was interrupted, first declare the launch over, because the followers are still running the task.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.stop_guard()
        if self._current_assignment is not None:  # an interrupt: the followers are still running a task
            self.store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, "rank 0 was interrupted"))
            self.store.post(REPORT_WRITTEN_KEY, True)
        self.store.post(f"work/{self._serial + 1}", ExitMessage(self.follower_status))
        self._witness_pipe.send(ShutdownMessage())
        self.destroy_group()
        if not self.launch.uses_agent_store and self._current_assignment is None:  # this process serves the store
            key = f"work/{self._serial + 1}/read"
            self.store.wait_for_keys(
                [],
                lambda spent: (
                    spent > FINAL_REPORT_SECONDS or self.store.add_to_counter(key, 0) in (0, self._follower_count)
                ),
            )

    @property
    def _follower_count(self) -> int:
        """Return the number of followers, which are all ranks other than rank 0."""
        return self.launch.world_size - 1

    def stop_guard(self) -> None:
        """Stop the guard thread, so that from now on only the main thread can write the report."""
        self._is_guarding = False
        if threading.current_thread() is not self._guard_thread and self._guard_thread.ident is not None:
            with suppress(OSError):
                self._signal_writer.send(b"\0")
            self._guard_thread.join()  # torch may crash if the thread still runs while the process exits

    def _collect_outcomes(self, assignment: Assignment, channel: StoreChannel) -> GroupOutcome:
        """Wait until every rank has posted its outcome, and return all outcomes.

        If a rank died, hangs or was stopped, this method does not return: it ends the launch. ``channel`` is this
        rank's channel for the task.
        """
        started_at = time.monotonic()
        keys = [rank_outcome_key(f"work/{assignment.serial}", rank) for rank in range(assignment.task.world_size)]
        if channel.has_left and not self.store.wait_for_keys(keys, lambda spent: spent > GRACE_SECONDS):
            self.break_group(assignment.serial)
        busy_count, limit = self.store.add_to_counter("busy", 0), assignment.task.timeout + SILENCE_TIMEOUT
        while not self.store.wait_for_keys(keys, partial(operator.lt, limit)):
            busy_count, busy_before, limit = self.store.add_to_counter("busy", 0), busy_count, SILENCE_TIMEOUT
            if busy_count == busy_before:
                self.store.post_if_absent(
                    LAUNCH_OVER_KEY, LaunchOver(0, f"not every rank reported an outcome of {assignment.title}")
                )
                self._end_launch(self.store)
        channel.delete_last_exchange()
        ranks = self._read_outcomes(self.store, assignment)
        if any(rank.end in LOST_ENDS for rank in ranks):
            self._end_launch(self.store)
        self.is_group_broken = self.store.has_keys(broken_group_key(assignment.serial))
        if self.is_group_broken:
            ranks = tuple(map(mark_peer_loss_as_stopped, ranks))
        self.store.delete_keys(*keys, broken_group_key(assignment.serial))
        return GroupOutcome(ranks, time.monotonic() - started_at)

    def _read_outcomes(self, store: LaunchStore, assignment: Assignment) -> tuple[RankOutcome, ...]:
        """Return the outcomes that the witnesses posted, with times converted to this machine's clock.

        A rank without a posted outcome gets an outcome with the end HUNG.
        """
        ranks = []
        for rank in range(assignment.task.world_size):
            key = rank_outcome_key(f"work/{assignment.serial}", rank)
            if store.has_keys(key):
                ranks.append(shift_times(store.read_value(key), self._clock_offsets.get(rank, 0)))
            else:
                ranks.append(RankOutcome(rank, RankEnd.HUNG, time.monotonic_ns(), cause=NO_REPORT_CAUSE))
        return tuple(ranks)

    def _start_guard(self) -> None:
        """Start the guard thread, and make it receive SIGTERM.

        The main thread cannot handle the signal, because Python runs no signal handler while a collective blocks.
        """
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=reset_signal_handling)
        self._guard_thread.start()

    def _run_guard(self) -> None:
        """Wait, in the guard thread, until the launch is over; then write the report and end the process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
        store = LaunchStore(self.launch)
        self._signal_reader.settimeout(POLL_SECONDS)
        while self._is_guarding:
            with suppress(TimeoutError):
                if signal.SIGTERM in self._signal_reader.recv(64):
                    store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, "torchrun ended the ranks (SIGTERM)"))
            if self._is_guarding and store.has_keys(LAUNCH_OVER_KEY):
                self._end_launch(store)

    def _end_launch(self, store: LaunchStore) -> NoReturn:
        """Write the final report and end the process.

        If a second thread calls this method, the call blocks until the process ends.
        """
        self._report_lock.acquire(
            timeout=-1 if threading.current_thread() is threading.main_thread() else WITNESS_REPORT_SECONDS
        )
        self._is_guarding, self._is_closed, assignment = False, True, self._current_assignment
        store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, ""))
        faulthandler.dump_traceback_later(FINAL_REPORT_SECONDS - WITNESS_REPORT_SECONDS, exit=True, file=2)
        outcome = None
        if assignment is not None:
            keys = [rank_outcome_key(f"work/{assignment.serial}", rank) for rank in range(assignment.task.world_size)]
            store.wait_for_keys(keys, lambda spent: spent > WITNESS_REPORT_SECONDS)
            outcome = GroupOutcome(
                assign_blame(tuple(map(mark_peer_loss_as_stopped, self._read_outcomes(store, assignment)))), 0.0
            )
        over: LaunchOver = store.read_value(LAUNCH_OVER_KEY)
        cause = outcome.cause if outcome is not None and outcome.cause is not None else None
        reason = (
            cause.describe() if cause is not None and cause.end in (RankEnd.SIGNALLED, RankEnd.EXITED) else over.message
        )
        status = 3
        self.undo_redirection()
        try:
            status = self._write_final_report(
                outcome, f"{reason}; torchrun's ranks cannot be replaced, so no further test or cell is run"
            )
        finally:
            store.post(REPORT_WRITTEN_KEY, True)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)


def reset_signal_handling() -> None:
    """Restore the default signal handling in a forked child, so that signals to the child do not wake up rank 0."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shift_times(outcome: RankOutcome, offset_ns: int) -> RankOutcome:
    """Return a copy of the outcome in which all times are ``offset_ns`` nanoseconds earlier."""
    notes = tuple(replace(note, at_ns=note.at_ns - offset_ns) for note in outcome.notes)
    return replace(outcome, at_ns=outcome.at_ns - offset_ns, notes=notes)


def mark_peer_loss_as_stopped(outcome: RankOutcome) -> RankOutcome:
    """Return ``outcome``, with the end STOPPED if the rank raised only because a peer closed the connection."""
    if outcome.end is not RankEnd.RAISED or not any(message in outcome.cause for message in PEER_LOST_MESSAGES):
        return outcome
    return replace(outcome, end=RankEnd.STOPPED, cause="", exception="", traceback="")


def assign_blame(ranks: tuple[RankOutcome, ...]) -> tuple[RankOutcome, ...]:
    """Decide whether the ranks that torchrun ended are the cause of the failure; return the corrected outcomes.

    If another rank is known to have failed, that rank is the cause, and ranks whose process has ended for an unknown
    reason become STOPPED. Otherwise the ranks that torchrun terminated are the cause and become SIGNALLED.
    """
    causes = [
        rank
        for rank in ranks
        if not rank.is_successful and rank.end is not RankEnd.STOPPED and not rank.cause.startswith(PROCESS_GONE_CAUSE)
    ]
    if causes:
        are_gone = [rank.end is RankEnd.EXITED and rank.cause.startswith(PROCESS_GONE_CAUSE) for rank in ranks]
        return tuple(
            replace(rank, end=RankEnd.STOPPED, cause="") if is_gone else rank
            for rank, is_gone in zip(ranks, are_gone, strict=True)
        )
    return tuple(
        replace(rank, end=RankEnd.SIGNALLED) if rank.end is RankEnd.STOPPED and rank.cause else rank for rank in ranks
    )


@contextmanager
def open_task_store(launch: Launch, group: GroupMode) -> Iterator[int]:
    """Context manager that yields the port of a new store for a task that calls ``init_process_group`` itself.

    The task cannot use the launch's own store, because that store still contains the keys of earlier process groups. If
    the task needs no store, or if the launch's address belongs to another machine, no store is served and 0 is yielded.
    """
    if group is not GroupMode.NONE or not launch.uses_agent_store or not is_local_address(launch.address):
        yield 0
        return
    store = TCPStore(launch.address, 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
    yield store.port


def is_local_address(address: str) -> bool:
    """Return whether ``address`` belongs to this machine, by trying to bind a socket to the address."""
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(socket_address)
    except OSError:
        return False
    return True
