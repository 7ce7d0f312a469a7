"""When ranks that have not ended a part of their task count as blocked by one that has ended it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from zharness.world import part_departures
from zharness.world.messages import ExchangeRequest, RankNote, RankStatus
from zharness.world.part_departures import PartDepartures
from zharness.world.rank_coordinator import RankCoordinator
from zharness.world.stacks import StackFrame, find_waiting_site, strip_harness_frames
from zharness.world.task_watcher import TaskWatcher

PROCESSES = [os.getpid()]


def in_barrier(line: int) -> tuple[StackFrame, ...]:
    """Return the stack of a rank that waits in a barrier which line ``line`` of a test calls."""
    return (
        StackFrame("/torch/distributed/distributed_c10d.py", 1, "barrier"),
        StackFrame("/home/me/test_mine.py", line, "test_it"),
    )


@pytest.mark.parametrize("status", [RankStatus.PART_FAILED, RankStatus.PART_LEFT])
def test_ranks_are_blocked_if_two_looks_find_them_at_the_same_place(
    status: RankStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_departures, "processor_seconds", lambda processes: 1.0)
    departures = PartDepartures()
    departures.add(1, status)
    assert not departures.block_others({0: in_barrier(7)}, PROCESSES), "one look is no proof"
    assert not departures.block_others({0: in_barrier(8)}, PROCESSES), "it has gone on since the first look"
    assert departures.block_others({0: in_barrier(8)}, PROCESSES)


def test_ranks_that_others_left_by_returning_are_blocked_if_nine_looks_find_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = [1.0]
    monkeypatch.setattr(part_departures, "processor_seconds", lambda processes: seconds[0])
    departures = PartDepartures()
    departures.add(1, RankStatus.PART_ENDED)
    looks = [departures.block_others({0: in_barrier(7)}, PROCESSES) for _ in range(5)]
    seconds[0] += 1.0  # a rank computed, so the count begins again
    looks += [departures.block_others({0: in_barrier(7)}, PROCESSES) for _ in range(9)]
    assert looks == [False] * 13 + [True]


def test_the_stack_of_a_rank_in_an_exchange_shows_its_caller() -> None:
    stack = "\n".join(
        [
            "Current thread 0x0001 (most recent call first):",
            '  File "/lib/python3.11/multiprocessing/connection.py", line 395 in _recv',
            '  File "/site/zharness/world/rank.py", line 103 in receive',
            '  File "/site/zharness/world/rank.py", line 118 in exchange',
            '  File "/site/zharness/world/current_rank.py", line 91 in exchange_as',
            '  File "/home/me/test_mine.py", line 7 in test_it',
            '  File "/site/zharness/world/rank.py", line 240 in run_task',
            '  File "/site/zharness/world/server.py", line 1 in main',
        ]
    )
    assert find_waiting_site(stack) == "an exchange with the other ranks (test_mine.py, line 7)"
    assert strip_harness_frames(stack).splitlines()[1:] == ['  File "/home/me/test_mine.py", line 7 in test_it']


def test_a_note_of_a_rank_that_goes_on_ends_its_departure() -> None:
    member: Any = SimpleNamespace(rank=1)
    task: Any = SimpleNamespace(timeout=60.0, world_size=2)
    watcher = TaskWatcher(SimpleNamespace(members=[SimpleNamespace(rank=0), member]), task, None)  # type: ignore[arg-type]
    watcher._handle_message(member, RankNote(1, 0, RankStatus.PART_FAILED, b""))
    assert watcher._part_departures
    watcher._handle_message(member, RankNote(1, 1, RankStatus.OK, b""))
    assert not watcher._part_departures


def test_a_rank_that_has_sent_its_verdict_waits_in_the_exchange() -> None:
    coordinator = RankCoordinator(world_size=3)
    for rank in (1, 2):
        coordinator.add_exchange_request(ExchangeRequest(rank, 1, "a Hypothesis example", "", b""))
    assert coordinator.waiting_ranks == {1, 2}
