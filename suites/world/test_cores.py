"""A lane's ranks on a core of their own, where every core has a lane."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from zharness.run.session import cores_of
from zharness.world import RankServer
from zharness.world.cores import share
from zharness.world.server import Surroundings

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no process to cores")


@dataclass(frozen=True)
class Worker:
    """As much of a pytest.Config as a worker of xdist has more than others."""

    workerinput: dict[str, Any] = field(default_factory=dict)


def usable(monkeypatch: pytest.MonkeyPatch, cores: Iterable[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cores))


def test_as_many_lanes_as_cores_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (2, 5, 7))
    assert [share(lane, 3) for lane in range(3)] == [{2}, {5}, {7}]


def test_more_lanes_than_cores_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    assert [share(lane, 3) for lane in range(3)] == [{0}, {1}, {0}]


def test_fewer_lanes_than_cores_run_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, range(4))
    assert not share(0, 1)
    assert not share(2, 3)


def test_a_system_without_affinity_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert not share(0, 64)


def test_a_worker_of_xdist_is_a_lane_and_a_session_without_workers_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    worker: Any = Worker({"workerid": "gw1", "workercount": 2})
    alone: Any = object()
    assert cores_of(worker) == {1}
    assert not cores_of(alone)


def test_ranks_keep_to_the_cores_of_their_server_and_nobody_else_does() -> None:
    mine = os.sched_getaffinity(0)
    core = max(mine)
    with RankServer(Surroundings(cores=frozenset({core}))) as kept, RankServer() as free:
        assert kept.run(os.sched_getaffinity, 0, world_size=2).values() == [{core}, {core}]
        assert free.run(os.sched_getaffinity, 0, world_size=2).values() == [mine, mine]
    assert os.sched_getaffinity(0) == mine
