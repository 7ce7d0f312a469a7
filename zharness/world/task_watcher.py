"""Watch the ranks that run a task, from the start of the task until every rank has an outcome."""

from __future__ import annotations

import math
import selectors
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
from zharness.world.part_departures import CHECK_SECONDS, PartDepartures
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
from zharness.world.stack_request import request_stacks, wait_for_stacks
from zharness.world.stacks import (
    find_waiting_collective,
    find_waiting_site,
    is_building,
    parse_main_thread,
    strip_harness_frames,
)
from zharness.world.streams import RankStream
from zharness.world.task import Isolation, RankTask
from zharness.world.team import RankTeam, SelectorEvent, TeamMember

PROCESS_EXIT_SECONDS = 0.2  # time between the closing of a process's files and its end
SHUTDOWN_SECONDS = 30.0  # time for ranks to end after the last task; 256 ranks on a busy machine need several seconds


class ClientGone(Exception):
    """Raised when the process that requested the task has ended, so that the ranks of the task have to be ended too."""


class TaskCancelled(Exception):
    """Raised when the client cancelled the running task; the rank server continues with the next request."""


class TaskWatcher:
    """Receives the messages and the output of the ranks until every rank has an outcome, and kills ranks that hang."""

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
        self._has_departures = False  # whether a rank skipped the rest of its task; others may wait for it forever
        self._part_departures = PartDepartures()
        self._hang_phases: dict[int, str] = {}
        self._ended_ranks: set[int] = set()
        self._pipe_faults: dict[int, str] = {}  # how ranks broke their control pipe; read on after "it"

    def wait_for_outcome(self) -> GroupOutcome:
        """Wait until every rank has an outcome, and return all outcomes.

        Raises ClientGone if the client has ended, and TaskCancelled if the client cancelled the task.
        """
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
        """Shut down ranks that run no task, and return how each rank ended."""
        now = time.monotonic_ns()
        self._outcomes = {member.rank: RankOutcome(member.rank, RankEnd.RETURNED, now) for member in self._team.members}
        self._shut_down_ranks()
        return GroupOutcome(tuple(self._make_final_outcome(member) for member in self._team.members), 0.0)

    def _process_events_until(self, is_done: Callable[[], bool]) -> None:
        """Handle events until ``is_done()`` returns True; check the ranks whenever the deadline or a check is due."""
        while not is_done():
            events = self._team.selector.select(self._deadline.remaining_seconds())
            for key, _ in events:
                self._handle_event(key.data)
            if not events and self._deadline.remaining_seconds() == 0.0:
                self._check_ranks()

    def _handle_event(self, event: SelectorEvent) -> None:
        """Handle one ready descriptor: of the client, or of a rank's output stream, control pipe or process."""
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
        """Raise TaskCancelled if the client sent a cancel request, or ClientGone if the client has ended."""
        assert self._client is not None, "only a registered client has events"
        try:
            self._client.recv()
        except (EOFError, OSError) as error:
            raise ClientGone from error
        raise TaskCancelled

    def _receive_message(self, member: TeamMember) -> bool:
        """Receive and handle one message of a rank; return False if the rank's control pipe is closed or broken.

        If the pipe is broken and the rank is still alive, this method records a pipe fault for the rank.
        """
        try:
            message = member.control.recv()
        except Exception as error:  # noqa: BLE001 - a test may have written anything into the pipe
            self._team.unregister(member.control)
            if member.rank in self._outcomes:
                return False  # the rank has reported its outcome; its exit status is judged later
            # A process closes its pipes a moment before it has ended.
            if not wait([member.end_descriptor], timeout=PROCESS_EXIT_SECONDS):
                self._pipe_faults[member.rank] = describe_pipe_fault(error)
            self._deadline.shorten(GRACE_SECONDS)
            return False
        self._handle_message(member, message)
        return True

    def _handle_message(self, member: TeamMember, message: object) -> None:
        """Process one message of a rank, such as an outcome, a note, an exchange request or an announcement."""
        if isinstance(message, RankOutcome):
            self._record_outcome(message)
        elif isinstance(message, RankNote):
            self._notes[member.rank].append(message)
            self._part_departures.remove(member.rank)  # a departure ends with the next note of the rank
            if message.status is RankStatus.FAILED:
                self._deadline.shorten(GRACE_SECONDS)
            elif message.status is RankStatus.SKIPPED and not self._has_departures:
                self._has_departures = True
                self._deadline.schedule_check(GRACE_SECONDS)
            elif message.status in (RankStatus.PART_FAILED, RankStatus.PART_LEFT, RankStatus.PART_ENDED):
                self._part_departures.add(member.rank, message.status)
                self._deadline.schedule_check(0.0)
        elif isinstance(message, DeadlineHold):
            self._deadline.hold(member.rank, message.reason)
        elif isinstance(message, ExchangeRequest):
            self._handle_exchange_request(member, message)
        elif isinstance(message, CollectiveAnnouncement) and self._coordinator.add_announcement(message):
            self._deadline.shorten(GRACE_SECONDS)

    def _handle_exchange_request(self, member: TeamMember, request: ExchangeRequest) -> None:
        """Handle a rank's request to exchange a value with its peers.

        If this request completes the exchange, the method sends every rank its answer. If a peer has already ended, the
        method sends this rank an ExchangeFailure.
        """
        if self._outcomes:
            ended = min(self._outcomes)
            member.send(ExchangeFailure(request.ordinal, f"rank {ended} ended before it took part in the exchange"))
            return
        answers = self._coordinator.add_exchange_request(request)
        if answers:
            self._part_departures.clear()
        self._send_answers(answers)

    def _send_answers(self, answers: Mapping[int, ExchangeAnswer]) -> None:
        """Send every rank in ``answers`` its answer to an exchange."""
        for rank, answer in answers.items():
            self._team.members[rank].send(answer)

    def _record_outcome(self, outcome: RankOutcome) -> None:
        """Record a rank's outcome, and fail the exchange that peers wait in, because it can no longer be completed."""
        self._outcomes[outcome.rank] = outcome
        self._send_answers(
            self._coordinator.abandon_exchange(f"rank {outcome.rank} ended before it took part in the exchange")
        )
        if not outcome.is_successful:
            self._deadline.shorten(GRACE_SECONDS)

    def _handle_process_end(self, member: TeamMember) -> None:
        """Handle the end of a rank's process: read the rank's last messages and output, and judge the exit status."""
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
        """Check the running ranks; kill them, extend the deadline, or schedule another check.

        The running ranks are killed in four cases. First, the deadline has passed and no build makes progress. Second,
        a rank has failed and all others wait in collectives or have used up their grace period. Third, a rank has
        skipped the rest of its task and all others wait in collectives. Fourth, a rank has ended a part of its task,
        which the others will never end.
        """
        running = [member for member in self._team.members if member.rank not in self._outcomes]
        if not running:  # all have outcomes, but some processes did not end after the shutdown message
            self._kill_ranks([member for member in self._team.members if member.rank not in self._ended_ranks], {})
            return
        # Read the phases before sending the signal, which interrupts a blocking system call and so may begin a phase.
        self._hang_phases = {member.rank: member.phase for member in running}
        stacks = self._collect_stacks(running)
        frames = {rank: parse_main_thread(stack) for rank, stack in stacks.items()}
        is_over, all_wait = self._deadline.is_over(), all(map(find_waiting_collective, frames.values()))
        if is_over and self._has_failure():
            if all_wait or not self._deadline.grant_last_grace():
                self._stop_all_but_failed_teardowns(running, stacks)
        elif is_over:
            builds = any(map(is_building, frames.values()))
            is_stuck = builds and not self._progress.is_progressing([member.pid for member in running])
            if is_stuck or not self._deadline.extend(builds):
                self._kill_ranks(running, stacks)
        elif self._has_departures and all_wait:
            self._kill_ranks(running, stacks)
        elif self._part_departures.block_others(
            {rank: stack for rank, stack in frames.items() if rank not in self._coordinator.waiting_ranks},
            [member.pid for member in running],
        ):
            self._kill_ranks(running, stacks, RankEnd.STOPPED)
        else:
            self._schedule_next_check()

    def _schedule_next_check(self) -> None:
        """Schedule another check if some rank waits in an exchange or has skipped the rest of its task."""
        seconds = 2 * GRACE_SECONDS if self._has_departures else math.inf
        self._deadline.schedule_check(CHECK_SECONDS if self._part_departures else seconds)

    def _stop_all_but_failed_teardowns(self, running: list[TeamMember], stacks: dict[int, str]) -> None:
        """Kill the running ranks, but let failed ranks outside of collectives tear down until the time-out."""
        tearing_down = [
            member
            for member in running
            if any(note.status is RankStatus.FAILED for note in self._notes[member.rank])
            and not find_waiting_collective(parse_main_thread(stacks[member.rank]))
        ]
        if tearing_down and self._deadline.restore():
            self._kill_ranks([member for member in running if member not in tearing_down], stacks)
        else:
            self._kill_ranks(running, stacks)

    def _has_failure(self) -> bool:
        """Return whether a rank failed or skipped; ranks that are killed after that count as stopped, not as hung."""
        bad = (RankStatus.FAILED, RankStatus.SKIPPED)
        has_bad_note = any(note.status in bad for notes in self._notes.values() for note in notes)
        has_bad_outcome = any(not outcome.is_successful for outcome in self._outcomes.values())
        return has_bad_note or has_bad_outcome or bool(self._pipe_faults) or bool(self._coordinator.mismatch)

    def _collect_stacks(self, members: list[TeamMember]) -> dict[int, str]:
        """Make ranks dump their stacks, and return the stacks by rank.

        The dump is written by faulthandler's signal handler, which is written in C and so works while Python hangs.
        """
        requests = []
        for member in members:
            ranks.get_stack_path(self._team.scratch_dir, member.rank).write_bytes(b"")
            if member.rank not in self._ended_ranks:
                requests.append(request_stacks(member.pid))
        return wait_for_stacks(requests, lambda: self._read_stacks(members), self._drain_streams)

    def _read_stacks(self, members: list[TeamMember]) -> dict[int, str]:
        """Return the part of their stacks that ranks have written so far, by rank."""
        return {
            member.rank: ranks.get_stack_path(self._team.scratch_dir, member.rank).read_text(errors="replace")
            for member in members
        }

    def _drain_streams(self, seconds: float) -> None:
        """Read the ranks' output, then sleep. A rank that blocks on a full pipe could not dump its stacks."""
        for member in self._team.members:
            for stream in member.streams:
                stream.drain()
        with selectors.DefaultSelector() as empty_selector:
            empty_selector.select(seconds)

    def _kill_ranks(self, members: list[TeamMember], stacks: dict[int, str], end: RankEnd = RankEnd.HUNG) -> None:
        """Kill the ranks ``members`` and record ``end`` for each, or that it was stopped if another rank failed.

        ``stacks`` contains the stacks that the ranks dumped, by rank.
        """
        has_failure = self._has_failure() or end is RankEnd.STOPPED
        for member in members:
            outcome = self._outcomes.get(member.rank)
            if outcome is None or not has_failure:
                self._outcomes[member.rank] = self._make_unfinished_outcome(
                    member, stacks.get(member.rank, ""), has_failure, outcome
                )
            member.process.kill()
            member.process.join()
            self._ended_ranks.add(member.rank)
            self._team.unregister(member.end_descriptor)

    def _make_unfinished_outcome(
        self, member: TeamMember, stack: str, has_failure: bool, outcome: RankOutcome | None
    ) -> RankOutcome:
        """Return the outcome of a rank that is about to be killed.

        ``outcome`` is the outcome that the rank has reported, after which its process did not exit, or None if the rank
        has not reported an outcome. ``has_failure`` says whether another rank failed.
        """
        end = RankEnd.STOPPED if has_failure else RankEnd.HUNG
        site = find_waiting_site(stack)
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
        """Send the shutdown message and wait until every process has ended. A crash at exit counts as a failure."""
        self._team.send_shutdown()
        self._deadline = Deadline(GRACE_SECONDS if self._has_failure() else SHUTDOWN_SECONDS)
        self._process_events_until(lambda: len(self._ended_ranks) == self._task.world_size)

    def _make_final_outcome(self, member: TeamMember) -> RankOutcome:
        """Return a rank's outcome, with the rank's notes, output and test phase, and the cause if it is known."""
        for stream in member.streams:
            stream.drain()
        output = tuple(strip_fatal_dump(part) for stream in member.streams for part in stream.take_output())
        outcome = replace(self._outcomes[member.rank], notes=tuple(self._notes[member.rank]), captured_output=output)
        outcome = add_known_cause(outcome, self._coordinator.mismatch)
        return replace(outcome, phase=outcome.phase or member.phase)


def describe_pipe_fault(error: Exception) -> str:
    """Describe how a rank broke its control pipe, as text that follows the word "it".

    ``error`` is the exception that reading from the pipe raised.
    """
    if isinstance(error, BlockingIOError):
        return "sent only the beginning of a message"
    if isinstance(error, (EOFError, OSError)):
        return CLOSED_PIPE_CAUSE
    return "sent bytes that are not a message"


def has_message(connection: Connection) -> bool:
    """Return whether a message or the end of the pipe can be read from ``connection`` without waiting."""
    try:
        return connection.poll(0)
    except (EOFError, OSError):
        return False


def strip_fatal_dump(output: CapturedOutput) -> CapturedOutput:
    """Return ``output`` without the harness's frames in the stack dump of a fatal error, if it contains such a dump."""
    return replace(output, text=strip_harness_frames(output.text)) if FATAL_ERROR_PREFIX in output.text else output
