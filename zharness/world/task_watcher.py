"""One piece of work in a team of ranks, watched from its start to the end of every rank."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from zharness.world import rank as ranks
from zharness.world.deadline import GRACE_SECONDS, Deadline
from zharness.world.messages import (
    CollectiveAnnouncement,
    DeadlineHold,
    ExchangeAnswer,
    ExchangeFailure,
    ExchangeRequest,
    RankNote,
    RankStatus,
)
from zharness.world.outcome import CapturedOutput, GroupOutcome, RankEnd, RankOutcome
from zharness.world.postmortem import (
    CLOSED_PIPE_CAUSE,
    FATAL_ERROR_PREFIX,
    add_known_cause,
    count_oom_kills,
    describe_hang,
    judge_exit,
)
from zharness.world.progress import ProgressMonitor
from zharness.world.rank_coordinator import RankCoordinator
from zharness.world.stacks import find_waiting_collective, is_building, parse_main_thread, strip_harness_frames
from zharness.world.streams import RankStream
from zharness.world.task import Isolation, RankTask
from zharness.world.team import RankTeam, SelectorEvent, TeamMember

STACK_DUMP_SECONDS = 0.5  # seconds for a hung rank to write its stacks
PROCESS_EXIT_SECONDS = 0.2  # seconds between the closing of a process's files and its end
SHUTDOWN_SECONDS = 30.0  # seconds for a rank to end once there is nothing left to do; 256 on a busy machine need many


class ClientGone(Exception):
    """Whoever asked for the work is gone, so its ranks have to be ended."""


class TaskCancelled(Exception):
    """Whoever asked for the work wants it no more, but goes on."""


class TaskWatcher:
    """Takes in what the ranks tell and print, until every one of them has an outcome."""

    def __init__(self, team: RankTeam, task: RankTask, client: Connection | None) -> None:
        self._team = team
        self._task = task
        self._client = client
        self._started_at = time.monotonic()
        self._oom_kills_before = count_oom_kills()
        self._deadline = Deadline(task.timeout)
        self._progress = ProgressMonitor()
        self._coordinator = RankCoordinator(task.world_size)
        self._outcomes: dict[int, RankOutcome] = {}
        self._notes: dict[int, list[RankNote]] = {member.rank: [] for member in team.members}
        self._has_departures = False  # whether a rank takes no further part: others may wait for it in vain
        self._hang_phases: dict[int, str] = {}
        self._ended_ranks: set[int] = set()
        self._pipe_faults: dict[int, str] = {}  # ranks that cannot be heard any more, and what they did

    def wait_for_outcome(self) -> GroupOutcome:
        """Every rank's end. Raises Abandoned or Recalled when the client goes or wants it no more."""
        if self._client is not None:
            self._team.selector.register(self._client, selectors.EVENT_READ, SelectorEvent(None, "client"))
        try:
            self._process_events_until(lambda: len(self._outcomes) == self._task.world_size)
            if self._task.isolation is Isolation.FRESH:
                self._shut_down_ranks()
            return GroupOutcome(
                tuple(self._make_final_outcome(member) for member in self._team.members),
                time.monotonic() - self._started_at,
            )
        finally:
            if self._client is not None:
                self._team.unregister(self._client)

    def shut_down_idle_ranks(self) -> GroupOutcome:
        """The ends of ranks that wait for work, and are told that there is none."""
        now = time.monotonic_ns()
        self._outcomes = {member.rank: RankOutcome(member.rank, RankEnd.RETURNED, now) for member in self._team.members}
        self._shut_down_ranks()
        return GroupOutcome(tuple(self._make_final_outcome(member) for member in self._team.members), 0.0)

    def _process_events_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            events = self._team.selector.select(self._deadline.remaining_seconds())
            for key, _ in events:
                self._handle_event(key.data)
            if not events and self._deadline.remaining_seconds() == 0.0:
                self._check_ranks()

    def _handle_event(self, event: SelectorEvent) -> None:
        member, source = event.member, event.source
        if member is None:
            self._handle_client()
        if isinstance(source, RankStream):
            if not source.read_available():
                self._team.unregister(source.descriptor)
        elif source == "control":
            self._receive_message(member)
        elif member.rank not in self._ended_ranks:
            self._handle_process_end(member)

    def _handle_client(self) -> NoReturn:
        """The only thing that a client sends while work runs is that it wants it no more."""
        assert self._client is not None, "watched, so it is there"
        try:
            self._client.recv()
        except (EOFError, OSError) as error:
            raise ClientGone from error
        raise TaskCancelled

    def _receive_message(self, member: TeamMember) -> bool:
        """Take in one message; False at the end of the pipe, which in a living rank is a fault."""
        try:
            message = member.control.recv()
        except Exception as error:  # noqa: BLE001 - whatever comes of unpickling what a test has written there
            self._team.unregister(member.control)
            if member.rank in self._outcomes:
                return False  # it has told all it had to tell, and its end will be judged
            # A process that ends closes its pipes a moment before it has ended.
            if not wait([member.end_descriptor], timeout=PROCESS_EXIT_SECONDS):
                self._pipe_faults[member.rank] = describe_pipe_fault(error)
            self._deadline.shorten(GRACE_SECONDS)
            return False
        self._handle_message(member, message)
        return True

    def _handle_message(self, member: TeamMember, message: object) -> None:
        if isinstance(message, RankOutcome):
            self._record_outcome(message)
        elif isinstance(message, RankNote):
            self._notes[member.rank].append(message)
            if message.status is RankStatus.FAILED:
                self._deadline.shorten(GRACE_SECONDS)
            elif message.status is RankStatus.SKIPPED and not self._has_departures:
                self._has_departures = True
                self._deadline.schedule_check(GRACE_SECONDS)
        elif isinstance(message, DeadlineHold):
            self._deadline.hold(member.rank, message.reason)
        elif isinstance(message, ExchangeRequest):
            self._handle_exchange_request(member, message)
        elif isinstance(message, CollectiveAnnouncement) and self._coordinator.add_announcement(message):
            self._deadline.shorten(GRACE_SECONDS)

    def _handle_exchange_request(self, member: TeamMember, request: ExchangeRequest) -> None:
        if self._outcomes:
            gone = min(self._outcomes)
            member.send(ExchangeFailure(request.ordinal, f"rank {gone} ended before it took part in the exchange"))
            return
        self._send_answers(self._coordinator.add_exchange_request(request))

    def _send_answers(self, answers: Mapping[int, ExchangeAnswer]) -> None:
        for rank, answer in answers.items():
            self._team.members[rank].send(answer)

    def _record_outcome(self, outcome: RankOutcome) -> None:
        """Record a rank's end; whoever waits for its vote waits in vain."""
        self._outcomes[outcome.rank] = outcome
        self._send_answers(
            self._coordinator.abandon_exchange(f"rank {outcome.rank} ended before it took part in the exchange")
        )
        if not outcome.is_successful:
            self._deadline.shorten(GRACE_SECONDS)

    def _handle_process_end(self, member: TeamMember) -> None:
        """A rank's process has ended: read what it still had to say, and judge its end."""
        self._team.unregister(member.end_descriptor)
        self._ended_ranks.add(member.rank)
        self._deadline.hold(member.rank, "")
        member.process.join()
        while member.rank not in self._pipe_faults and has_message(member.control) and self._receive_message(member):
            continue
        for stream in member.streams:
            stream.drain()
        self._record_outcome(
            judge_exit(
                member, self._outcomes.get(member.rank), self._pipe_faults.get(member.rank, ""), self._oom_kills_before
            )
        )

    def _check_ranks(self) -> None:
        """The deadline is over, or it is time to look whether anybody waits in vain."""
        waiting = [member for member in self._team.members if member.rank not in self._outcomes]
        if not waiting:  # they were told to leave, and did not
            self._kill_ranks([member for member in self._team.members if member.rank not in self._ended_ranks], {})
            return
        # Before the ranks are asked: the signal that asks ends a system call that would have gone on for ever.
        self._hang_phases = {member.rank: member.phase for member in waiting}
        stacks = self._collect_stacks(waiting)
        frames = {rank: parse_main_thread(stack) for rank, stack in stacks.items()}
        over, in_vain = self._deadline.is_over(), all(map(find_waiting_collective, frames.values()))
        if over and self._has_failure():
            if in_vain or not self._deadline.grant_last_grace():
                self._stop_all_but_failed_teardowns(waiting, stacks)
        elif over:
            building = any(map(is_building, frames.values()))
            stuck = building and not self._progress.is_progressing([member.pid for member in waiting])
            if stuck or not self._deadline.extend(building):
                self._kill_ranks(waiting, stacks)
        elif self._has_departures and in_vain:
            self._kill_ranks(waiting, stacks)
        else:
            self._deadline.schedule_check(2 * GRACE_SECONDS)

    def _stop_all_but_failed_teardowns(self, waiting: list[TeamMember], stacks: dict[int, str]) -> None:
        """A rank that has told its failure, and waits for nobody, has a teardown of its own to finish in its time."""
        ending = [
            member
            for member in waiting
            if any(note.status is RankStatus.FAILED for note in self._notes[member.rank])
            and not find_waiting_collective(parse_main_thread(stacks[member.rank]))
        ]
        if ending and self._deadline.restore():
            self._kill_ranks([member for member in waiting if member not in ending], stacks)
        else:
            self._kill_ranks(waiting, stacks)

    def _has_failure(self) -> bool:
        """Whether a rank has failed, so that the others are ended rather than timed out."""
        told = any(note.status is not RankStatus.OK for notes in self._notes.values() for note in notes)
        ended = any(not outcome.is_successful for outcome in self._outcomes.values())
        return told or ended or bool(self._pipe_faults) or bool(self._coordinator.mismatch)

    def _collect_stacks(self, members: list[TeamMember]) -> dict[int, str]:
        """Every rank's stacks; they are written by a signal handler in C, also while Python is stuck."""
        for member in members:
            ranks.get_stack_path(self._team.scratch_dir, member.rank).write_bytes(b"")
            if member.rank not in self._ended_ranks:
                os.kill(member.pid, signal.SIGUSR1)
        stacks = {member.rank: "" for member in members}
        until = time.monotonic() + STACK_DUMP_SECONDS
        while time.monotonic() < until:
            self._drain_streams(0.02)
            now = {
                rank: ranks.get_stack_path(self._team.scratch_dir, rank).read_text(errors="replace") for rank in stacks
            }
            if all(now.values()) and now == stacks:
                break
            stacks = now
        return stacks

    def _drain_streams(self, seconds: float) -> None:
        """Take in what the ranks print, and nothing else: a rank that waits at a full pipe could not answer."""
        for member in self._team.members:
            for stream in member.streams:
                stream.drain()
        with selectors.DefaultSelector() as nothing:
            nothing.select(seconds)

    def _kill_ranks(self, members: list[TeamMember], stacks: dict[int, str]) -> None:
        """Name every rank that is left as hung, or as stopped if another had failed, and kill it."""
        trouble = self._has_failure()
        for member in members:
            outcome = self._outcomes.get(member.rank)
            if outcome is None or not trouble:
                self._outcomes[member.rank] = self._make_unfinished_outcome(
                    member, stacks.get(member.rank, ""), trouble, outcome
                )
            member.process.kill()
            member.process.join()
            self._ended_ranks.add(member.rank)
            self._team.unregister(member.end_descriptor)

    def _make_unfinished_outcome(
        self, member: TeamMember, stack: str, has_failure: bool, outcome: RankOutcome | None
    ) -> RankOutcome:
        """What becomes of a rank that is killed because its time, or that of its group, is up."""
        end = RankEnd.STOPPED if has_failure else RankEnd.HUNG
        site = find_waiting_collective(parse_main_thread(stack))
        cause = (
            ""
            if has_failure
            else describe_hang(self._task.timeout if outcome is None else SHUTDOWN_SECONDS, stack, outcome is not None)
        )
        if member.rank in self._pipe_faults:
            end, cause = RankEnd.EXITED, f"it {self._pipe_faults[member.rank]}, and did not end"
        phase = self._hang_phases.get(member.rank, member.phase)
        return RankOutcome(member.rank, end, time.monotonic_ns(), cause=cause, stack=stack, site=site, phase=phase)

    def _shut_down_ranks(self) -> None:
        """Tell fresh ranks to leave, and judge how they end: a fault after the work is a fault."""
        self._team.send_shutdown()
        self._deadline = Deadline(GRACE_SECONDS if self._has_failure() else SHUTDOWN_SECONDS)
        self._process_events_until(lambda: len(self._ended_ranks) == self._task.world_size)

    def _make_final_outcome(self, member: TeamMember) -> RankOutcome:
        for stream in member.streams:
            stream.drain()
        printed = tuple(strip_fatal_dump(part) for stream in member.streams for part in stream.take_output())
        outcome = replace(self._outcomes[member.rank], notes=tuple(self._notes[member.rank]), captured_output=printed)
        outcome = add_known_cause(outcome, self._coordinator.mismatch)
        return replace(outcome, phase=outcome.phase or member.phase)


def describe_pipe_fault(error: Exception) -> str:
    """What a rank did to the pipe on which it reports, by the error of reading from it; reads on after "it"."""
    if isinstance(error, BlockingIOError):
        return "told the beginning of a message only"
    if isinstance(error, (EOFError, OSError)):
        return CLOSED_PIPE_CAUSE
    return "told what is no message"


def has_message(connection: Connection) -> bool:
    """Whether a message, or the end, is waiting."""
    try:
        return connection.poll(0)
    except (EOFError, OSError):
        return False


def strip_fatal_dump(output: CapturedOutput) -> CapturedOutput:
    """The stack that a fatal error writes, without the frames that are the same in every rank."""
    return replace(output, text=strip_harness_frames(output.text)) if FATAL_ERROR_PREFIX in output.text else output
