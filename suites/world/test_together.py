"""Exchanges, joint assertions and the detection of mismatched collectives, all outside of the collectives."""

import pytest
import torch
import torch.distributed as dist

from zharness.comm import Comm
from zharness.errors import WorldError
from zharness.pytest_ranks.fixtures import announce_collective
from zharness.world import RankEnd, RankServer, assert_together, exchange, is_rank, run


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_an_exchange_gives_every_rank_every_value_in_rank_order(world_size: int) -> None:
    def body():
        return [exchange(("round", number, dist.get_rank())) for number in range(3)]

    expected = [[("round", number, rank) for rank in range(world_size)] for number in range(3)]
    assert run(body, world_size=world_size) == [expected] * world_size


def test_an_exchange_with_a_rank_that_has_ended_raises_and_names_it() -> None:
    def body():
        if dist.get_rank() == 0:
            return None
        with pytest.raises(WorldError, match="rank 0 ended before it took part"):
            exchange(1)
        return "raised"

    assert run(body, world_size=2) == [None, "raised"]


def test_assert_together_fails_on_all_ranks_and_names_those_with_a_false_condition() -> None:
    def body():
        with pytest.raises(AssertionError, match=r"1 of 3 ranks: rank 1: got 1"):
            assert_together(dist.get_rank() != 1, f"got {dist.get_rank()}")
        assert_together(True)
        dist.barrier()  # all ranks are still in step
        return True

    assert run(body, world_size=3) == [True] * 3


def test_an_exchange_outside_of_ranks_names_the_remedy() -> None:
    assert not is_rank()
    with pytest.raises(WorldError, match="world_size"):
        exchange(1)


def differ(culprit: int, what: str) -> None:
    comm = Comm(observer=announce_collective)
    comm.all_reduce(torch.ones(4))
    if dist.get_rank() != culprit:
        comm.all_reduce(torch.ones(4))
    elif what == "shape":
        comm.all_reduce(torch.ones(5))
    elif what == "dtype":
        comm.all_reduce(torch.ones(4, dtype=torch.float64))
    else:
        comm.broadcast(torch.ones(4))


TIMEOUT = 60.0  # seconds; on 2 busy cores the last of 20 ranks may need 10 to start


# 20 ranks are more than MAX_CHECKED_WORLD_SIZE.
@pytest.mark.parametrize("world_size", [2, 20])
@pytest.mark.parametrize(
    ("what", "operand"), [("shape", "float32[5]"), ("dtype", "float64[4]"), ("operation", "broadcast float32[4]")]
)
def test_mismatched_collectives_are_named_with_both_call_sites(world_size: int, what: str, operand: str) -> None:
    with RankServer() as server:
        outcome = server.run(differ, 1, what, world_size=world_size, timeout=TIMEOUT)
    assert outcome.cause is not None
    assert outcome.cause.end is RankEnd.RAISED
    assert outcome.cause.cause.startswith("collective calls differ between ranks at call 2: rank ")
    text = outcome.describe()
    call = operand if what == "operation" else f"all_reduce {operand}"
    assert f"rank 1 calls {call} (test_together.py, line " in text
    assert "calls all_reduce float32[4] (test_together.py, line " in text
    assert outcome.seconds < TIMEOUT / 2, "long before the time-out; test_faults.py judges the bar of 2 s"
