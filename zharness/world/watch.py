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
from zharness.world.agreement import Agreement
from zharness.world.deadline import GRACE, Deadline
from zharness.world.labour import Labour
from zharness.world.messages import Announced, Answer, Hold, Note, NoVotes, Standing, Vote
from zharness.world.outcome import End, GroupOutcome, Printed, RankOutcome
from zharness.world.postmortem import CLOSED, FATAL, judge_exit, killed_for_memory, named, where
from zharness.world.stacks import is_building, main_thread, waiting_in, without_machinery
from zharness.world.streams import Stream
from zharness.world.team import Event, Member, Team
from zharness.world.work import Isolation, Work

LAST_WORDS = 0.5  # seconds for a hung rank to write its stacks
ENDING = 0.2  # seconds between the closing of a process's files and its end
LEAVING = 30.0  # seconds for a rank to end once there is nothing left to do; 256 on a busy machine need many


class Abandoned(Exception):
    """Whoever asked for the work is gone, so its ranks have to be ended."""


class Recalled(Exception):
    """Whoever asked for the work wants it no more, but goes on."""


class Watch:
    """Takes in what the ranks tell and print, until every one of them has an outcome."""

    def __init__(self, team: Team, work: Work, client: Connection | None) -> None:
        self._team = team
        self._work = work
        self._client = client
        self._began = time.monotonic()
        self._memory_kills = killed_for_memory()
        self._deadline = Deadline(work.timeout)
        self._labour = Labour()
        self._agreement = Agreement(work.world_size)
        self._outcomes: dict[int, RankOutcome] = {}
        self._notes: dict[int, list[Note]] = {member.rank: [] for member in team.members}
        self._left = False  # whether a rank takes no further part: others may wait for it in vain
        self._phases: dict[int, str] = {}
        self._gone: set[int] = set()
        self._lost: dict[int, str] = {}  # ranks that cannot be heard any more, and what they did

    def outcome(self) -> GroupOutcome:
        """Every rank's end. Raises Abandoned or Recalled when the client goes or wants it no more."""
        if self._client is not None:
            self._team.selector.register(self._client, selectors.EVENT_READ, Event(None, "client"))
        try:
            self._until(lambda: len(self._outcomes) == self._work.world_size)
            if self._work.isolation is Isolation.FRESH:
                self._see_them_off()
            return GroupOutcome(
                tuple(self._told(member) for member in self._team.members), time.monotonic() - self._began
            )
        finally:
            if self._client is not None:
                self._team.unwatch(self._client)

    def parting(self) -> GroupOutcome:
        """The ends of ranks that wait for work, and are told that there is none."""
        now = time.monotonic_ns()
        self._outcomes = {member.rank: RankOutcome(member.rank, End.RETURNED, now) for member in self._team.members}
        self._see_them_off()
        return GroupOutcome(tuple(self._told(member) for member in self._team.members), 0.0)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            events = self._team.selector.select(self._deadline.remaining())
            for key, _ in events:
                self._take(key.data)
            if not events and self._deadline.remaining() == 0.0:
                self._look()

    def _take(self, event: Event) -> None:
        member, source = event.member, event.source
        if member is None:
            self._heed_client()
        if isinstance(source, Stream):
            if not source.pump():
                self._team.unwatch(source.source)
        elif source == "control":
            self._hear(member)
        elif member.rank not in self._gone:
            self._bury(member)

    def _heed_client(self) -> NoReturn:
        """The only thing that a client sends while work runs is that it wants it no more."""
        assert self._client is not None, "watched, so it is there"
        try:
            self._client.recv()
        except (EOFError, OSError) as error:
            raise Abandoned from error
        raise Recalled

    def _hear(self, member: Member) -> bool:
        """Take in one message; False at the end of the pipe, which in a living rank is a fault."""
        try:
            message = member.control.recv()
        except Exception as error:  # noqa: BLE001 - whatever comes of unpickling what a test has written there
            self._team.unwatch(member.control)
            if member.rank in self._outcomes:
                return False  # it has told all it had to tell, and its end will be judged
            # A process that ends closes its pipes a moment before it has ended.
            if not wait([member.ended], timeout=ENDING):
                self._lost[member.rank] = what_it_did(error)
            self._deadline.cut(GRACE)
            return False
        self._heed(member, message)
        return True

    def _heed(self, member: Member, message: object) -> None:
        if isinstance(message, RankOutcome):
            self._settle(message)
        elif isinstance(message, Note):
            self._notes[member.rank].append(message)
            if message.standing is Standing.FAILED:
                self._deadline.cut(GRACE)
            elif message.standing is Standing.LEFT and not self._left:
                self._left = True
                self._deadline.look_in(GRACE)
        elif isinstance(message, Hold):
            self._deadline.hold(member.rank, message.reason)
        elif isinstance(message, Vote):
            self._vote(member, message)
        elif isinstance(message, Announced) and self._agreement.announced(message):
            self._deadline.cut(GRACE)

    def _vote(self, member: Member, vote: Vote) -> None:
        if self._outcomes:
            gone = min(self._outcomes)
            member.tell(NoVotes(vote.ordinal, f"rank {gone} ended before it took part in the exchange"))
            return
        self._answer(self._agreement.voted(vote))

    def _answer(self, answers: Mapping[int, Answer]) -> None:
        for rank, answer in answers.items():
            self._team.members[rank].tell(answer)

    def _settle(self, outcome: RankOutcome) -> None:
        """Record a rank's end; whoever waits for its vote waits in vain."""
        self._outcomes[outcome.rank] = outcome
        self._answer(self._agreement.abandon(f"rank {outcome.rank} ended before it took part in the exchange"))
        if not outcome.sound:
            self._deadline.cut(GRACE)

    def _bury(self, member: Member) -> None:
        """A rank's process has ended: read what it still had to say, and judge its end."""
        self._team.unwatch(member.ended)
        self._gone.add(member.rank)
        self._deadline.hold(member.rank, "")
        member.process.join()
        while member.rank not in self._lost and readable(member.control) and self._hear(member):
            continue
        for stream in member.streams:
            stream.drain()
        self._settle(
            judge_exit(member, self._outcomes.get(member.rank), self._lost.get(member.rank, ""), self._memory_kills)
        )

    def _look(self) -> None:
        """The deadline is over, or it is time to look whether anybody waits in vain."""
        waiting = [member for member in self._team.members if member.rank not in self._outcomes]
        if not waiting:  # they were told to leave, and did not
            self._stop([member for member in self._team.members if member.rank not in self._gone], {})
            return
        # Before the ranks are asked: the signal that asks ends a system call that would have gone on for ever.
        self._phases = {member.rank: member.phase for member in waiting}
        stacks = self._ask(waiting)
        frames = {rank: main_thread(stack) for rank, stack in stacks.items()}
        over, in_vain = self._deadline.is_over(), all(map(waiting_in, frames.values()))
        if over and self._trouble():
            if in_vain or not self._deadline.spare():
                self._stop_all_but_those_that_end_a_failed_test(waiting, stacks)
        elif over:
            building = any(map(is_building, frames.values()))
            stuck = building and not self._labour.goes_on([member.pid for member in waiting])
            if stuck or not self._deadline.extend(building):
                self._stop(waiting, stacks)
        elif self._left and in_vain:
            self._stop(waiting, stacks)
        else:
            self._deadline.look_in(2 * GRACE)

    def _stop_all_but_those_that_end_a_failed_test(self, waiting: list[Member], stacks: dict[int, str]) -> None:
        """A rank that has told its failure, and waits for nobody, has a teardown of its own to finish in its time."""
        ending = [
            member
            for member in waiting
            if any(note.standing is Standing.FAILED for note in self._notes[member.rank])
            and not waiting_in(main_thread(stacks[member.rank]))
        ]
        if ending and self._deadline.restore():
            self._stop([member for member in waiting if member not in ending], stacks)
        else:
            self._stop(waiting, stacks)

    def _trouble(self) -> bool:
        """Whether a rank has failed, so that the others are ended rather than timed out."""
        told = any(note.standing is not Standing.FINE for notes in self._notes.values() for note in notes)
        ended = any(not outcome.sound for outcome in self._outcomes.values())
        return told or ended or bool(self._lost) or bool(self._agreement.mismatch)

    def _ask(self, members: list[Member]) -> dict[int, str]:
        """Every rank's stacks; they are written by a signal handler in C, also while Python is stuck."""
        for member in members:
            ranks.stack_file(self._team.room, member.rank).write_bytes(b"")
            if member.rank not in self._gone:
                os.kill(member.pid, signal.SIGUSR1)
        stacks = {member.rank: "" for member in members}
        until = time.monotonic() + LAST_WORDS
        while time.monotonic() < until:
            self._pump(0.02)
            now = {rank: ranks.stack_file(self._team.room, rank).read_text(errors="replace") for rank in stacks}
            if all(now.values()) and now == stacks:
                break
            stacks = now
        return stacks

    def _pump(self, seconds: float) -> None:
        """Take in what the ranks print, and nothing else: a rank that waits at a full pipe could not answer."""
        for member in self._team.members:
            for stream in member.streams:
                stream.drain()
        with selectors.DefaultSelector() as nothing:
            nothing.select(seconds)

    def _stop(self, members: list[Member], stacks: dict[int, str]) -> None:
        """Name every rank that is left as hung, or as stopped if another had failed, and kill it."""
        trouble = self._trouble()
        for member in members:
            outcome = self._outcomes.get(member.rank)
            if outcome is None or not trouble:
                self._outcomes[member.rank] = self._unfinished(member, stacks.get(member.rank, ""), trouble, outcome)
            member.process.kill()
            member.process.join()
            self._gone.add(member.rank)
            self._team.unwatch(member.ended)

    def _unfinished(self, member: Member, stack: str, trouble: bool, outcome: RankOutcome | None) -> RankOutcome:
        """What becomes of a rank that is killed because its time, or that of its group, is up."""
        end = End.STOPPED if trouble else End.HUNG
        site = waiting_in(main_thread(stack))
        cause = "" if trouble else where(self._work.timeout if outcome is None else LEAVING, stack, outcome is not None)
        if member.rank in self._lost:
            end, cause = End.EXITED, f"it {self._lost[member.rank]}, and did not end"
        phase = self._phases.get(member.rank, member.phase)
        return RankOutcome(member.rank, end, time.monotonic_ns(), cause=cause, stack=stack, site=site, phase=phase)

    def _see_them_off(self) -> None:
        """Tell fresh ranks to leave, and judge how they end: a fault after the work is a fault."""
        self._team.dismiss()
        self._deadline = Deadline(GRACE if self._trouble() else LEAVING)
        self._until(lambda: len(self._gone) == self._work.world_size)

    def _told(self, member: Member) -> RankOutcome:
        for stream in member.streams:
            stream.drain()
        printed = tuple(readable_dump(part) for stream in member.streams for part in stream.taken())
        outcome = replace(self._outcomes[member.rank], notes=tuple(self._notes[member.rank]), printed=printed)
        outcome = named(outcome, self._agreement.mismatch)
        return replace(outcome, phase=outcome.phase or member.phase)


def what_it_did(error: Exception) -> str:
    """What a rank did to the pipe on which it reports, by the error of reading from it; reads on after "it"."""
    if isinstance(error, BlockingIOError):
        return "told the beginning of a message only"
    if isinstance(error, (EOFError, OSError)):
        return CLOSED
    return "told what is no message"


def readable(connection: Connection) -> bool:
    """Whether a message, or the end, is waiting."""
    try:
        return connection.poll(0)
    except (EOFError, OSError):
        return False


def readable_dump(part: Printed) -> Printed:
    """The stack that a fatal error writes, without the frames that are the same in every rank."""
    return replace(part, text=without_machinery(part.text)) if FATAL in part.text else part
