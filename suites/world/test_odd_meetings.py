"""Exchanges that a rank leaves or that mismatch, and rare cases of echoed output and seeds."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suites.attached.launches import find_free_port
from zharness.pytest_ranks.rank_protocol import seed_generators
from zharness.world import GroupMode, Isolation, RankServer, assert_together, exchange, run
from zharness.world.current_rank import CurrentRank, ExchangeMismatchError, current_rank, set_current_rank
from zharness.world.launch import Launch
from zharness.world.messages import ExchangeRequest, ExchangeResult
from zharness.world.rank_coordinator import RankCoordinator
from zharness.world.store import LaunchStore, StoreChannel
from zharness.world.streams import READ_BYTES, RankStream


def mismatch_exchange() -> str:
    """Call different functions on the two ranks, then exchange successfully; return the error of the mismatch."""
    with pytest.raises(ExchangeMismatchError) as caught:
        _ = exchange(1) if current_rank().rank == 0 else assert_together(True)
    assert exchange(current_rank().rank) == [0, 1]
    return str(caught.value)


def assert_both_got_the_mismatch(messages: list[str]) -> None:
    file = re.escape(Path(__file__).name)
    assert messages[0] == messages[1]
    assert re.fullmatch(
        "calls that exchange values differ between ranks: "
        rf"rank 0 calls exchange \({file}, line \d+\), rank 1 calls assert_together \({file}, line \d+\)",
        messages[0],
    )


def test_all_ranks_of_a_mismatched_exchange_get_the_error_and_can_go_on() -> None:
    assert_both_got_the_mismatch(run(mismatch_exchange, world_size=2, group=GroupMode.NONE))


def test_all_ranks_of_a_mismatched_exchange_in_a_launch_get_the_error_and_can_go_on() -> None:
    port = find_free_port()

    def body() -> str:
        mine = current_rank()
        launch = Launch(mine.rank, 2, mine.rank, 2, "127.0.0.1", port, uses_agent_store=False)
        store = LaunchStore(launch, serve=mine.rank == 0)
        set_current_rank(CurrentRank(mine.rank, 2, StoreChannel(store, None, 1, mine.rank, 2, Path()), Path()))  # type: ignore[arg-type]
        message = mismatch_exchange()
        set_current_rank(mine)
        exchange(None)  # rank 0 serves the store until both have read it
        return message

    assert_both_got_the_mismatch(run(body, world_size=2, group=GroupMode.NONE))


def leave_an_exchange() -> None:
    """Send a value, and leave the exchange by an exception before any peer has sent one."""

    class Left(Exception):
        pass

    def leave(*_: object) -> None:
        raise Left

    def receive_with_timer() -> object:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # after the value has been sent
        return receive()

    channel = current_rank().channel
    receive = channel.receive
    signal.signal(signal.SIGALRM, leave)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "receive", receive_with_timer)
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


def test_a_rank_that_leaves_an_exchange_by_an_exception_runs_the_next_task() -> None:
    def body(number: int) -> object:
        if number:
            return exchange(number)
        if dist.get_rank() == 0:
            leave_an_exchange()
            dist.barrier()
        else:
            dist.barrier()
            exchange("one")  # so that the server sends an answer to rank 0, which never reads it
        dist.barrier()
        return None

    with RankServer(inherited_function=body) as server:
        for number, value in enumerate((None, [1, 1], [2, 2])):
            outcome = server.call(number, world_size=2, isolation=Isolation.POOLED, group=GroupMode.REUSED)
            assert outcome.values() == [value] * 2


def test_a_rank_that_left_an_exchange_does_not_mismatch_its_own_next_one() -> None:
    coordinator = RankCoordinator(2)
    assert coordinator.add_exchange_request(ExchangeRequest(0, 1, "exchange", "here", b"left")) == {}
    assert coordinator.add_exchange_request(ExchangeRequest(0, 2, "assert_together", "there", b"0")) == {}
    answers = coordinator.add_exchange_request(ExchangeRequest(1, 1, "assert_together", "there", b"1"))
    assert answers == {0: ExchangeResult(2, (b"0", b"1")), 1: ExchangeResult(1, (b"0", b"1"))}


def test_output_without_newlines_is_echoed_in_pieces_of_bounded_length() -> None:
    source, sink = os.pipe()
    pieces: list[str] = []
    stream = RankStream("stdout", source, pieces.append)
    written = "".join(chr(0x20AC + number % 64) for number in range(1_000_000)).encode()
    for at in range(0, len(written), 60_001):  # ends in the middle of characters, which have three bytes each
        os.write(sink, written[at : at + 60_001])
        stream.read_available()
        assert len(stream._partial_line) <= READ_BYTES
    os.close(sink)
    stream.take_output()
    stream.close()
    assert "".join(pieces).encode() == written
    assert all(len(piece) <= READ_BYTES for piece in pieces)


def test_seed_generators_gives_the_random_numbers_of_torch_manual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    with torch.random.fork_rng(devices=[]):
        seed_generators("test_it.py::test_it")
        ours = torch.rand(3)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch, "manual_seed", seeds.append)
            seed_generators("test_it.py::test_it")
        torch.manual_seed(seeds[0])
        assert torch.equal(torch.rand(3), ours)
