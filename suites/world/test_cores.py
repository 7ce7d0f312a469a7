"""A lane's ranks on a core of their own, where every core has a lane; and how ranks share one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from zharness.cell import Cell
from zharness.run import PlannedCell
from zharness.run.runner import pin_runners_to_cores
from zharness.world import Group, RankServer
from zharness.world.cores import assign_cores, use_batch_scheduling

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no process to cores")


def usable(monkeypatch: pytest.MonkeyPatch, cores: Iterable[int]) -> None:
    monkeypatch.delenv("ZHARNESS_DEVICE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cores))


def test_as_many_lanes_as_cores_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (2, 5, 7))
    assert [assign_cores(lane, 3) for lane in range(3)] == [{2}, {5}, {7}]


def test_more_lanes_than_cores_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    assert [assign_cores(lane, 3) for lane in range(3)] == [{0}, {1}, {0}]


def test_fewer_lanes_than_cores_run_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, range(4))
    assert not assign_cores(0, 1)
    assert not assign_cores(2, 3)


def test_a_system_without_affinity_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert not assign_cores(0, 64)


@dataclass
class Lane:
    """As much of a Runner as is asked of it here: the cores that it was told to keep to."""

    cores: list[Any] = field(default_factory=list)

    def keep_to(self, cores: frozenset[int]) -> None:
        self.cores.extend(cores)


def given(cells: int, model: str = "mlp", unsupported: str = "") -> list[list[Any]]:
    """The cores of two lanes that have so many cells to run."""
    lanes: list[Any] = [Lane(), Lane()]
    case = Cell("training.grads", "reference", 0, 2, "fp32", model)
    pin_runners_to_cores(lanes, [PlannedCell(case, unsupported)] * cells)
    return [lane.cores for lane in lanes]


def test_lanes_with_enough_to_do_for_every_core_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    assert given(2) == [[0], [1]]


def test_a_single_cell_has_every_core_and_so_has_any_where_others_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    assert given(1) == [[], []]
    assert given(9, unsupported="not claimed") == [[], []]


def test_cells_of_anyone_s_own_model_have_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    assert given(9, model="my_package.models:large") == [[], []]


def test_ranks_on_gpus_have_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    usable(monkeypatch, (0, 1))
    monkeypatch.setenv("ZHARNESS_DEVICE", "cuda")
    assert given(9) == [[], []]


@pytest.fixture
def all_cores() -> Iterator[set[int]]:
    """Those that this process may use; the suites' own settings keep a worker of xdist to one of its parent's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before | os.sched_getaffinity(os.getppid()))
    yield os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)


def test_ranks_keep_to_the_core_of_their_server_and_nobody_else_does(all_cores: set[int]) -> None:
    if len(all_cores) < 2:
        pytest.skip("one core, to which everything keeps anyway")
    core = max(all_cores)
    with RankServer() as kept, RankServer() as free:
        kept.pin_to_cores({core})
        free.pin_to_cores(frozenset())
        assert kept.run(os.sched_getaffinity, 0, world_size=2).values() == [{core}, {core}]
        assert free.run(os.sched_getaffinity, 0, world_size=2).values() == [all_cores, all_cores]
    assert os.sched_getaffinity(0) == all_cores


@pytest.fixture
def in_turns() -> Iterator[None]:
    """This process is scheduled as any other; the suites' own settings have it preempt nobody."""
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        pytest.skip(f"the system lets nobody choose how it is scheduled: {error}")
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, before, os.sched_param(0))


@pytest.mark.usefixtures("in_turns")
def test_ranks_on_cpus_preempt_nobody_and_those_on_gpus_whom_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZHARNESS_DEVICE", raising=False)
    with RankServer() as server:
        assert server.run(os.sched_getscheduler, 0, world_size=2).values() == [os.SCHED_BATCH] * 2
    monkeypatch.setenv("ZHARNESS_DEVICE", "cuda")
    with RankServer() as server:
        # Without a group, which would want a GPU for each.
        policies = server.run(os.sched_getscheduler, 0, world_size=2, group=Group.NONE).values()
    assert policies == [os.SCHED_OTHER] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def chosen() -> int:
    """The policy of this process, where somebody had chosen one for it."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    use_batch_scheduling()
    return os.sched_getscheduler(0)


@pytest.mark.usefixtures("in_turns")
def test_a_policy_that_somebody_has_chosen_is_left_as_it_is() -> None:
    with RankServer() as server:
        assert server.run(chosen, group=Group.NONE).values() == [os.SCHED_IDLE]
