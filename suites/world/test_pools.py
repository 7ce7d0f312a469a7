"""Ranks that live on: reused, replaced after a fault, and gone when they are dismissed."""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import get_debug_level

from zharness.world import CollectiveMode, Group, Isolation, RankEnd, RankServer, RankTask


def pooled(function, *args, world_size=2, group=Group.REUSED, pool="", **more):
    return RankTask(function, args, world_size, group=group, isolation=Isolation.POOLED, pool=pool, **more)


def who() -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), id(dist.group.WORLD), total.item()


def test_pooled_ranks_take_one_piece_of_work_after_the_other() -> None:
    with RankServer() as server:
        first = server.submit(pooled(who)).values()
        second = server.submit(pooled(who)).values()
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert [group for _, group, _ in first] == [group for _, group, _ in second]
    assert [total for _, _, total in second] == [1.0, 1.0]


def count_groups() -> tuple[int, float]:
    return os.getpid(), who()[2]


def test_a_new_group_in_living_ranks_is_a_new_group() -> None:
    with RankServer() as server:
        found = [server.submit(pooled(count_groups, group=Group.DEFAULT)).values() for _ in range(5)]
    assert all(values == found[0] for values in found)


def test_pools_of_different_names_and_sizes_share_no_rank() -> None:
    with RankServer() as server:
        pids = [
            pid
            for pool, world_size in (("a", 2), ("b", 2), ("a", 4))
            for pid, _, _ in server.submit(pooled(who, pool=pool, world_size=world_size)).values()
        ]
    assert len(set(pids)) == 8


def fall(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_after_a_fault_only_the_affected_ranks_are_replaced() -> None:
    with RankServer() as server:
        bystanders = server.submit(pooled(who, pool="other")).values()
        before = server.submit(pooled(who)).values()
        outcome = server.submit(pooled(fall, 1))
        assert outcome.cause is not None
        assert (outcome.cause.rank, outcome.cause.end) == (1, RankEnd.SIGNALLED)
        after = server.submit(pooled(who)).values()
        assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}
        assert server.submit(pooled(who, pool="other")).values() == bystanders


def die_later() -> None:
    threading.Timer(0.05, os._exit, (3,)).start()


def test_ranks_that_died_between_two_pieces_of_work_are_replaced() -> None:
    with RankServer() as server:
        server.submit(pooled(die_later))
        threading.Event().wait(0.5)
        assert [total for _, _, total in server.submit(pooled(who)).values()] == [1.0, 1.0]


def test_dismissed_ranks_are_gone_and_told_about() -> None:
    with RankServer() as server:
        pids = [pid for pid, _, _ in server.submit(pooled(who)).values()]
        outcome = server.close_pool("", 2)
        assert outcome is not None
        assert not outcome.failures
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert server.close_pool("", 2) is None


def leave_badly() -> None:
    import atexit

    atexit.register(os._exit, 3)


def test_a_rank_that_leaves_with_a_bad_status_is_told_when_it_is_dismissed() -> None:
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
    told = outcome.describe()
    assert "mismatch between collectives" in told
    assert told.count("in mismatch") == 2, "both call sites"
    assert outcome.seconds < 10.0, "long before the time-out; test_faults.py judges the bar of 2 s"


def level_of_the_group() -> tuple[int, str]:
    return os.getpid(), get_debug_level().name


def test_ranks_that_live_on_compare_the_collectives_of_the_work_that_asks_for_it() -> None:
    ways = [CollectiveMode.TRUSTED, CollectiveMode.CHECKED, CollectiveMode.TRUSTED]
    with RankServer() as server:
        found = [server.submit(pooled(level_of_the_group, collectives=way)).values() for way in ways]
        told = server.submit(pooled(mismatch, collectives=CollectiveMode.CHECKED)).describe()
    assert [{level for _, level in values} for values in found] == [{"OFF"}, {"DETAIL"}, {"OFF"}]
    assert len({tuple(pid for pid, _ in values) for values in found}) == 1, "the same ranks"
    assert "mismatch between collectives" in told


RARE = "torch.utils.made_up_for_this_test"


def had_it() -> bool:
    """Whether this rank found the module imported; it has it from now on."""
    found = RARE in sys.modules
    importlib.import_module(RARE)
    return found


def test_what_one_rank_imported_of_torch_the_next_ones_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{RARE.rpartition('.')[2]}.py").touch()
    monkeypatch.setattr(torch.utils, "__path__", [*torch.utils.__path__, str(tmp_path)])
    with RankServer() as server:
        first = server.run(had_it, world_size=2)
        second = server.run(had_it, world_size=2)
    assert [rank.imported_modules for rank in first.ranks] == [(RARE,)] * 2
    assert [rank.imported_modules for rank in second.ranks] == [()] * 2
    assert first.values() == [False, False]
    assert second.values() == [True, True]
