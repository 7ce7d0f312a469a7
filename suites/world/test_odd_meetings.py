"""Exchanges that are left, or in which ranks meet that call different functions; and other odd ends of small parts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suites.attached.launches import free_port
from zharness.pytest_ranks.rank_protocol import seed_generators
from zharness.world import Group, Isolation, RankServer, assert_together, exchange, run
from zharness.world.current_rank import CurrentRank, ExchangeMismatchError, current_rank, set_current_rank
from zharness.world.launch import Launch
from zharness.world.messages import ExchangeRequest, ExchangeResult
from zharness.world.rank_coordinator import RankCoordinator
from zharness.world.store import LaunchStore, StoreChannel
from zharness.world.streams import READ_BYTES, RankStream


def meet_apart() -> str:
    """What this rank is told when its peer calls the other function; afterwards both are at one place again."""
    with pytest.raises(ExchangeMismatchError) as told:
        _ = exchange(1) if current_rank().rank == 0 else assert_together(True)
    assert exchange(current_rank().rank) == [0, 1]
    return str(told.value)


def told_to_both(words: list[str]) -> None:
    place = re.escape(Path(__file__).name)
    assert words[0] == words[1]
    assert re.fullmatch(
        "the ranks are not at the same place: "
        rf"rank 0 calls exchange \({place}, line \d+\), rank 1 calls assert_together \({place}, line \d+\)",
        words[0],
    )


def test_ranks_that_meet_in_different_functions_are_all_told_of_both_and_go_on() -> None:
    told_to_both(run(meet_apart, world_size=2, group=Group.NONE))


def test_ranks_of_a_launch_that_meet_in_different_functions_are_all_told_of_both_and_go_on() -> None:
    port = free_port()

    def body() -> str:
        mine = current_rank()
        launch = Launch(mine.rank, 2, mine.rank, 2, "127.0.0.1", port, uses_agent_store=False)
        board = LaunchStore(launch, serve=mine.rank == 0)
        set_current_rank(CurrentRank(mine.rank, 2, StoreChannel(board, None, 1, mine.rank, 2, Path())))  # type: ignore[arg-type]
        words = meet_apart()
        set_current_rank(mine)
        exchange(None)  # rank 0 keeps the store until both have read it
        return words

    told_to_both(run(body, world_size=2, group=Group.NONE))


def leave_an_exchange() -> None:
    """Vote, and be out of the exchange by an exception before any peer has voted."""

    class Left(Exception):
        pass

    def leave(*_: object) -> None:
        raise Left

    def timed() -> object:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # not before the vote is given
        return receive()

    channel = current_rank().channel
    receive = channel.receive
    signal.signal(signal.SIGALRM, leave)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "receive", timed)
        with pytest.raises(Left):
            exchange("left")


def test_a_rank_that_leaves_an_exchange_by_an_exception_reads_the_right_answer_to_the_next_one() -> None:
    def body() -> list[object]:
        if dist.get_rank() == 0:
            leave_an_exchange()
            dist.barrier()
        else:
            dist.barrier()
            assert exchange("one") == ["left", "one"]
        dist.barrier()
        return exchange(dist.get_rank())

    assert run(body, world_size=2) == [[0, 1], [0, 1]]


def test_a_rank_that_leaves_an_exchange_by_an_exception_takes_the_next_work() -> None:
    def body(number: int) -> object:
        if number:
            return exchange(number)
        if dist.get_rank() == 0:
            leave_an_exchange()
            dist.barrier()
        else:
            dist.barrier()
            exchange("one")  # so that an answer is on its way to rank 0, which never reads it
        dist.barrier()
        return None

    with RankServer(inherited_function=body) as server:
        for number, value in enumerate((None, [1, 1], [2, 2])):
            outcome = server.call(number, world_size=2, isolation=Isolation.POOLED, group=Group.REUSED)
            assert outcome.values() == [value] * 2


def test_a_rank_that_left_an_exchange_is_not_apart_from_itself() -> None:
    agreement = RankCoordinator(2)
    assert agreement.add_exchange_request(ExchangeRequest(0, 1, "exchange", "here", b"left")) == {}
    assert agreement.add_exchange_request(ExchangeRequest(0, 2, "assert_together", "there", b"0")) == {}
    answers = agreement.add_exchange_request(ExchangeRequest(1, 1, "assert_together", "there", b"1"))
    assert answers == {0: ExchangeResult(2, (b"0", b"1")), 1: ExchangeResult(1, (b"0", b"1"))}


def test_what_is_printed_without_an_end_of_line_is_echoed_in_pieces_of_bounded_length() -> None:
    source, sink = os.pipe()
    pieces: list[str] = []
    stream = RankStream("stdout", source, pieces.append)
    written = "".join(chr(0x20AC + number % 64) for number in range(1_000_000)).encode()
    for at in range(0, len(written), 60_001):  # in the middle of letters, of three bytes each
        os.write(sink, written[at : at + 60_001])
        stream.read_available()
        assert len(stream._partial_line) <= READ_BYTES
    os.close(sink)
    stream.take_output()
    stream.close()
    assert "".join(pieces).encode() == written
    assert all(len(piece) <= READ_BYTES for piece in pieces)


def test_a_seed_gives_the_random_numbers_that_torch_s_own_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with torch.random.fork_rng(devices=[]):
        seed_generators("test_it.py::test_it")
        ours = torch.rand(3)
        with monkeypatch.context() as where_a_device_is_in_use:
            where_a_device_is_in_use.setattr(torch.cuda, "is_initialized", lambda: True)
            where_a_device_is_in_use.setattr(torch, "manual_seed", asked.append)
            seed_generators("test_it.py::test_it")
        torch.manual_seed(asked[0])
        assert torch.equal(torch.rand(3), ours)
