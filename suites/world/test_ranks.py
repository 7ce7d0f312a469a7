"""Every way in which a rank can end is reported with its rank and its cause, and no process is left behind."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from zharness.errors import UsageError, WorldError
from zharness.world import GroupMode, GroupOutcome, RankEnd, RankServer, RanksFailed, run
from zharness.world.limits import largest_world_size
from zharness.world.server import RankEnvironment

WORLD_SIZES = (2, 4)


def run_and_get_outcome(function, *args, world_size=2, timeout=30.0, group=GroupMode.DEFAULT):
    with RankServer() as server:
        return server.run(function, *args, world_size=world_size, timeout=timeout, group=group)


def outcome_without_group(function):
    """Run ``function`` on ranks without a process group, so that no rank's end affects another."""
    return run_and_get_outcome(function, group=GroupMode.NONE)


def process_group_is_gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), total.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_value_in_rank_order(world_size: int) -> None:
    values = run(sum_of_ranks, world_size=world_size)
    assert [total for _, total in values] == [sum(range(world_size))] * world_size
    assert len({pid for pid, _ in values}) == world_size


def test_a_closure_runs_without_being_pickled() -> None:
    lock = threading.Lock()  # cannot be pickled
    assert run(lambda: lock.locked() or dist.get_rank(), world_size=2) == [0, 1]


def test_ranks_without_a_group_do_not_touch_torch_distributed() -> None:
    assert run(dist.is_initialized, world_size=2, group=GroupMode.NONE) == [False, False]


def raise_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError(f"planted on {culprit}")
    dist.barrier()


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_raise_while_peers_wait_names_the_rank_and_the_exception(culprit: int, world_size: int) -> None:
    outcome = run_and_get_outcome(raise_on, culprit, world_size=world_size)
    assert outcome.cause is not None
    assert outcome.cause.rank == culprit
    assert outcome.cause.end is RankEnd.RAISED
    assert outcome.cause.cause == f"ValueError: planted on {culprit}"
    assert "raise_on" in outcome.cause.traceback
    assert len(outcome.failures) == world_size, "every rank's end is reported, not only the culprit's"


def kill_self(culprit: int, number: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_death_by_a_signal_is_named_and_not_blamed_on_the_peer(culprit: int, number: signal.Signals) -> None:
    outcome = run_and_get_outcome(kill_self, culprit, number)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.end) == (culprit, RankEnd.SIGNALLED)
    assert number.name in outcome.cause.cause


def exit_with(culprit: int, status: int) -> int:
    if dist.get_rank() == culprit:
        os._exit(status)
    dist.barrier()
    return 0


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_without_a_result_is_a_failure_whatever_its_status(culprit: int, status: int) -> None:
    outcome = run_and_get_outcome(exit_with, culprit, status)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.end) == (culprit, RankEnd.EXITED)
    assert f"exit status {status}" in outcome.cause.cause


def exit_by_exception() -> None:
    sys.exit(5)


def test_sys_exit_is_reported_as_an_exception() -> None:
    outcome = outcome_without_group(exit_by_exception)
    assert [rank.cause for rank in outcome.ranks] == ["SystemExit: 5", "SystemExit: 5"]


def hang_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        threading.Event().wait()
    dist.barrier()


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_hang_ends_at_the_deadline_with_the_stack_of_every_rank(culprit: int, world_size: int) -> None:
    outcome = run_and_get_outcome(hang_on, culprit, world_size=world_size, timeout=2.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.HUNG] * world_size
    assert all("hang_on" in rank.stack for rank in outcome.ranks)
    assert "wait" in outcome.ranks[culprit].stack
    assert outcome.seconds < 2.0 + 3.0


def hang_with_blocked_signals(culprit: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
    if dist.get_rank() == culprit:
        threading.Event().wait()
    dist.barrier()


def test_a_hung_rank_that_blocks_signals_is_ended() -> None:
    outcome = run_and_get_outcome(hang_with_blocked_signals, 1, timeout=2.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.HUNG, RankEnd.HUNG]


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no pickling today")


def raise_unpicklable() -> None:
    raise Unpicklable("planted")


def test_an_exception_that_cannot_be_pickled_is_reported() -> None:
    outcome = outcome_without_group(raise_unpicklable)
    assert [rank.cause for rank in outcome.ranks] == ["Unpicklable: planted"] * 2


def return_unpicklable() -> object:
    return threading.Lock()


def test_a_return_value_that_cannot_be_pickled_is_the_rank_s_failure() -> None:
    outcome = outcome_without_group(return_unpicklable)
    assert all("cannot pickle" in rank.cause for rank in outcome.ranks)


def print_much_then_raise() -> None:
    sys.stdout.write("x" * 5_000_000)
    sys.stderr.write("the last words\n")
    raise ValueError("planted")


def test_long_output_is_truncated_to_its_end() -> None:
    outcome = outcome_without_group(print_much_then_raise)
    assert all(rank.output.endswith("the last words") for rank in outcome.ranks)
    assert all(len(rank.output) < 10_000 for rank in outcome.ranks)


def leave_a_child() -> int:
    if os.fork() == 0:
        threading.Event().wait()
    return os.getpid()


def test_a_child_that_a_rank_leaves_behind_is_killed_with_it() -> None:
    with RankServer() as server:
        pids = server.run(leave_a_child, world_size=2).values()
        assert all(process_group_is_gone(pid) for pid in pids)


def test_the_server_goes_on_after_a_fault() -> None:
    with RankServer() as server:
        assert server.run(kill_self, 0, signal.SIGSEGV, world_size=2).cause is not None
        assert [total for _, total in server.run(sum_of_ranks, world_size=2).values()] == [1.0, 1.0]


def test_closing_the_server_ends_it_and_its_ranks() -> None:
    server = RankServer()
    process = server._process
    pids = [pid for pid, _ in server.run(sum_of_ranks, world_size=2).values()]
    server.close()
    assert process.exitcode is not None
    assert all(process_group_is_gone(pid) for pid in pids)


def test_a_failed_warm_up_is_reported_at_the_first_request() -> None:
    message = "warm-up json:nothing_of_the_kind raised AttributeError"
    with (
        RankServer(RankEnvironment(warm_up="json:nothing_of_the_kind")) as server,
        pytest.raises(WorldError, match=message),
    ):
        server.run(sum_of_ranks, world_size=2)


def test_values_raises_an_error_that_describes_every_failed_rank() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 raised: ValueError: planted on 1") as caught:
        run(raise_on, 1, world_size=2)
    assert isinstance(caught.value.outcome, GroupOutcome)


@pytest.mark.parametrize("world_size", [0, -1, 100_000])
def test_a_world_that_cannot_be_started_is_refused_with_what_is_allowed(world_size: int) -> None:
    with pytest.raises(UsageError, match=f"world size {world_size} .* allowed: 1 to"):
        run(sum_of_ranks, world_size=world_size)
    assert 1 <= largest_world_size()[0] <= 256


def stamp() -> int:
    return time.monotonic_ns()


def test_clocks_of_ranks_can_be_compared() -> None:
    before = time.monotonic_ns()
    stamps = run(stamp, world_size=2)
    assert all(before < value < time.monotonic_ns() for value in stamps)
