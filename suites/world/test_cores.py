"""CPU affinity of lanes and scheduling policy of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from zharness.cell import Cell
from zharness.run import PlannedCell
from zharness.run.runner import pin_runners_to_cores
from zharness.world import GroupMode, RankServer
from zharness.world.cores import assign_cores, use_batch_scheduling

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")


def set_usable_cores(monkeypatch: pytest.MonkeyPatch, cores: Iterable[int]) -> None:
    monkeypatch.delenv("ZHARNESS_DEVICE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cores))


def test_as_many_lanes_as_cores_get_one_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (2, 5, 7))
    assert [assign_cores(lane, 3) for lane in range(3)] == [{2}, {5}, {7}]


def test_more_lanes_than_cores_share_cores_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (0, 1))
    assert [assign_cores(lane, 3) for lane in range(3)] == [{0}, {1}, {0}]


def test_fewer_lanes_than_cores_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, range(4))
    assert not assign_cores(0, 1)
    assert not assign_cores(2, 3)


def test_lanes_are_not_pinned_on_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert not assign_cores(0, 64)


@dataclass
class Lane:
    """A stand-in for a Runner that records the cores to which it is pinned."""

    cores: list[Any] = field(default_factory=list)

    def pin_to_cores(self, cores: frozenset[int]) -> None:
        self.cores.extend(cores)


def pinned_cores(cells: int, model: str = "mlp", unsupported: str = "") -> list[list[Any]]:
    """Return the cores of two lanes that have ``cells`` cells to run."""
    lanes: list[Any] = [Lane(), Lane()]
    cell = Cell("training.grads", "reference", 0, 2, "fp32", model)
    pin_runners_to_cores(lanes, [PlannedCell(cell, unsupported)] * cells)
    return [lane.cores for lane in lanes]


def test_lanes_are_pinned_if_every_core_has_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (0, 1))
    assert pinned_cores(2) == [[0], [1]]


def test_a_single_cell_and_unsupported_cells_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (0, 1))
    assert pinned_cores(1) == [[], []]
    assert pinned_cores(9, unsupported="not claimed") == [[], []]


def test_cells_of_a_user_model_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (0, 1))
    assert pinned_cores(9, model="my_package.models:large") == [[], []]


def test_cells_on_gpus_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_usable_cores(monkeypatch, (0, 1))
    monkeypatch.setenv("ZHARNESS_DEVICE", "cuda")
    assert pinned_cores(9) == [[], []]


@pytest.fixture
def all_cores() -> Iterator[set[int]]:
    """Let this process use all cores: the suites' configuration pins an xdist worker to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before | os.sched_getaffinity(os.getppid()))
    yield os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)


def test_pinning_a_server_pins_its_ranks_and_no_other_process(all_cores: set[int]) -> None:
    if len(all_cores) < 2:
        pytest.skip("one core only")
    core = max(all_cores)
    with RankServer() as pinned, RankServer() as free:
        pinned.pin_to_cores({core})
        free.pin_to_cores(frozenset())
        assert pinned.run(os.sched_getaffinity, 0, world_size=2).values() == [{core}, {core}]
        assert free.run(os.sched_getaffinity, 0, world_size=2).values() == [all_cores, all_cores]
    assert os.sched_getaffinity(0) == all_cores


@pytest.fixture
def default_scheduling() -> Iterator[None]:
    """Give this process the default policy: the suites' configuration gives it SCHED_BATCH."""
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        pytest.skip(f"the scheduling policy cannot be changed: {error}")
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, before, os.sched_param(0))


@pytest.mark.usefixtures("default_scheduling")
def test_ranks_on_cpus_use_batch_scheduling_and_ranks_on_gpus_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZHARNESS_DEVICE", raising=False)
    with RankServer() as server:
        assert server.run(os.sched_getscheduler, 0, world_size=2).values() == [os.SCHED_BATCH] * 2
    monkeypatch.setenv("ZHARNESS_DEVICE", "cuda")
    monkeypatch.setattr("zharness.world.server.require_visible_gpus", lambda: None)
    with RankServer() as server:
        # Without a group, which would need one GPU per rank.
        policies = server.run(os.sched_getscheduler, 0, world_size=2, group=GroupMode.NONE).values()
    assert policies == [os.SCHED_OTHER] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def use_batch_scheduling_after_idle() -> int:
    """Set SCHED_IDLE, request batch scheduling, and return the resulting policy."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    use_batch_scheduling()
    return os.sched_getscheduler(0)


@pytest.mark.usefixtures("default_scheduling")
def test_a_policy_other_than_the_default_is_left_unchanged() -> None:
    with RankServer() as server:
        assert server.run(use_batch_scheduling_after_idle, group=GroupMode.NONE).values() == [os.SCHED_IDLE]
