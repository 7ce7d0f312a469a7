"""Pooled ranks are reused, replaced after a fault, and ended when their pool is closed."""

import importlib
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import get_debug_level

from zharness.world import CollectiveMode, GroupMode, Isolation, RankEnd, RankServer, RankTask
from zharness.world.team import MAX_THREADS


def pooled(function, *args, world_size=2, group=GroupMode.REUSED, pool="", **more):
    return RankTask(function, args, world_size, group=group, isolation=Isolation.POOLED, pool=pool, **more)


def sum_and_identity() -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), id(dist.group.WORLD), total.item()


def test_pooled_ranks_run_one_task_after_another() -> None:
    with RankServer() as server:
        first = server.submit(pooled(sum_and_identity)).values()
        second = server.submit(pooled(sum_and_identity)).values()
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert [group for _, group, _ in first] == [group for _, group, _ in second]
    assert [total for _, _, total in second] == [1.0, 1.0]


def count_groups() -> tuple[int, float]:
    return os.getpid(), sum_and_identity()[2]


def test_a_new_default_group_in_pooled_ranks_works_on_the_same_processes() -> None:
    with RankServer() as server:
        found = [server.submit(pooled(count_groups, group=GroupMode.DEFAULT)).values() for _ in range(5)]
    assert all(values == found[0] for values in found)


def test_pools_of_different_names_and_sizes_share_no_rank() -> None:
    with RankServer() as server:
        pids = [
            pid
            for pool, world_size in (("a", 2), ("b", 2), ("a", 4))
            for pid, _, _ in server.submit(pooled(sum_and_identity, pool=pool, world_size=world_size)).values()
        ]
    assert len(set(pids)) == 8


def leave_groups(count: int) -> int:
    for _ in range(count):
        dist.all_reduce(torch.zeros(1), group=dist.new_group())
    return os.getpid()


def test_ranks_that_accumulate_threads_of_process_groups_are_replaced() -> None:
    with RankServer() as server:
        few = server.submit(pooled(leave_groups, 2)).values()
        many = server.submit(pooled(leave_groups, MAX_THREADS // 2)).values()
        after = server.submit(pooled(leave_groups, 0)).values()
    assert few == many
    assert not set(many) & set(after)


def crash(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_after_a_fault_only_the_affected_ranks_are_replaced() -> None:
    with RankServer() as server:
        bystanders = server.submit(pooled(sum_and_identity, pool="other")).values()
        before = server.submit(pooled(sum_and_identity)).values()
        outcome = server.submit(pooled(crash, 1))
        assert outcome.cause is not None
        assert (outcome.cause.rank, outcome.cause.end) == (1, RankEnd.SIGNALLED)
        after = server.submit(pooled(sum_and_identity)).values()
        assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}
        assert server.submit(pooled(sum_and_identity, pool="other")).values() == bystanders


def gather_and_raise(culprit: int = -1) -> None:
    dist.barrier()
    if dist.get_rank() == culprit:
        raise ValueError(os.getpid())
    raise ValueError(os.getpid())


@pytest.mark.parametrize(
    ("isolation", "culprit", "is_kept"),
    [
        (Isolation.POOLED_AFTER_ERRORS, -1, True),
        (Isolation.POOLED_AFTER_ERRORS, 1, False),
        (Isolation.POOLED, -1, False),
    ],
)
def test_ranks_that_raise_the_same_error_are_kept_if_the_task_says_so(
    isolation: Isolation, culprit: int, is_kept: bool
) -> None:
    with RankServer() as server:
        before = [pid for pid, _, _ in server.submit(pooled(sum_and_identity)).values()]
        outcome = server.submit(replace(pooled(gather_and_raise, culprit), isolation=isolation))
        assert [rank.end for rank in outcome.ranks] == [RankEnd.RAISED, RankEnd.RAISED]
        after = server.submit(pooled(sum_and_identity)).values()
    assert ([pid for pid, _, _ in after] == before) is is_kept
    assert [total for _, _, total in after] == [1.0, 1.0]


def gather_for_a_while(counts: tuple[int, int], makes_group: bool) -> None:
    """Raise after as many asynchronous barriers as ``counts`` has for this rank, of a group of its own or the world."""
    group = dist.new_group([0, 1]) if makes_group else None
    for number in range(3):
        if number == counts[dist.get_rank()]:
            raise ValueError(os.getpid())
        dist.barrier(group, async_op=True)


@pytest.mark.parametrize("makes_group", [False, True])
@pytest.mark.parametrize(("counts", "is_kept"), [((1, 1), True), ((1, 2), False), ((2, 1), False)])
def test_ranks_that_raise_at_the_same_line_after_unequal_numbers_of_collectives_are_not_kept(
    counts: tuple[int, int], is_kept: bool, makes_group: bool
) -> None:
    with RankServer() as server:
        before = [pid for pid, _, _ in server.submit(pooled(sum_and_identity)).values()]
        task = pooled(gather_for_a_while, counts, makes_group)
        outcome = server.submit(replace(task, isolation=Isolation.POOLED_AFTER_ERRORS))
        assert [rank.end for rank in outcome.ranks] == [RankEnd.RAISED, RankEnd.RAISED]
        after = server.submit(pooled(sum_and_identity)).values()
    assert ([pid for pid, _, _ in after] == before) is is_kept
    assert [total for _, _, total in after] == [1.0, 1.0]


def die_later() -> None:
    threading.Timer(0.05, os._exit, (3,)).start()


def test_ranks_that_died_between_two_tasks_are_replaced() -> None:
    with RankServer() as server:
        server.submit(pooled(die_later))
        threading.Event().wait(0.5)
        assert [total for _, _, total in server.submit(pooled(sum_and_identity)).values()] == [1.0, 1.0]


def test_closing_a_pool_ends_its_ranks_and_returns_their_outcome() -> None:
    with RankServer() as server:
        pids = [pid for pid, _, _ in server.submit(pooled(sum_and_identity)).values()]
        outcome = server.close_pool("", 2)
        assert outcome is not None
        assert not outcome.failures
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert server.close_pool("", 2) is None


def leave_badly() -> None:
    import atexit

    atexit.register(os._exit, 3)


def test_a_bad_exit_status_is_reported_when_a_pool_is_closed() -> None:
    with RankServer() as server:
        server.submit(pooled(leave_badly)).values()
        outcome = server.close_pool("", 2)
    assert outcome is not None
    assert [rank.end for rank in outcome.ranks] == [RankEnd.EXITED, RankEnd.EXITED]
    assert "exit status 3, after its function had returned" in outcome.describe()


def mismatch() -> None:
    tensor = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)


def test_checked_collectives_name_a_mismatch_of_raw_torch_calls_within_two_seconds() -> None:
    with RankServer() as server:
        outcome = server.submit(RankTask(mismatch, (), 2, collectives=CollectiveMode.CHECKED))
    description = outcome.describe()
    assert "mismatch between collectives" in description
    assert description.count("in mismatch") == 2, "both call sites"
    assert outcome.seconds < 10.0, "long before the time-out; test_faults.py judges the bar of 2 s"


def debug_level() -> tuple[int, str]:
    return os.getpid(), get_debug_level().name


def test_pooled_ranks_check_collectives_only_for_tasks_that_request_it() -> None:
    modes = [CollectiveMode.TRUSTED, CollectiveMode.CHECKED, CollectiveMode.TRUSTED]
    with RankServer() as server:
        levels = [server.submit(pooled(debug_level, collectives=mode)).values() for mode in modes]
        description = server.submit(pooled(mismatch, collectives=CollectiveMode.CHECKED)).describe()
    assert [{level for _, level in values} for values in levels] == [{"OFF"}, {"DETAIL"}, {"OFF"}]
    assert len({tuple(pid for pid, _ in values) for values in levels}) == 1, "the same ranks"
    assert "mismatch between collectives" in description


RARE = "torch.utils.made_up_for_this_test"


def import_rare_module() -> bool:
    """Import the module; return whether this rank had it already."""
    was_imported = RARE in sys.modules
    importlib.import_module(RARE)
    return was_imported


def test_modules_of_torch_that_a_rank_imported_are_inherited_by_the_next_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{RARE.rpartition('.')[2]}.py").touch()
    monkeypatch.setattr(torch.utils, "__path__", [*torch.utils.__path__, str(tmp_path)])
    with RankServer() as server:
        first = server.run(import_rare_module, world_size=2)
        second = server.run(import_rare_module, world_size=2)
    assert [rank.imported_modules for rank in first.ranks] == [(RARE,)] * 2
    assert [rank.imported_modules for rank in second.ranks] == [()] * 2
    assert first.values() == [False, False]
    assert second.values() == [True, True]
