"""Rare faults of ranks and of their server: none blocks the server, and each is blamed on the right rank."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from zharness.errors import WorldError
from zharness.world import GroupMode, GroupOutcome, Isolation, RankEnd, RankServer, exchange
from zharness.world import team as team_module
from zharness.world.current_rank import current_rank
from zharness.world.messages import ExchangeRequest, RankStatus
from zharness.world.server import RankEnvironment

LIMIT = 60.0  # seconds after which a blocked server fails its test, so that it does not block this process


@pytest.fixture(autouse=True)
def _no_server_blocks_this_process() -> Iterator[None]:
    def give_up(*_: object) -> None:
        pytest.fail(f"the rank server has not answered within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def run_body(body, timeout=30.0, server=None, **task_fields) -> GroupOutcome:  # type: ignore[no-untyped-def]
    """Run ``body`` on two ranks without a process group."""
    with server or RankServer(inherited_function=body) as server:
        return server.call(world_size=2, timeout=timeout, group=GroupMode.NONE, **task_fields)


def wait_forever() -> None:
    threading.Event().wait()


def test_a_rank_that_stops_itself_is_named_at_the_deadline() -> None:
    def body() -> None:
        if current_rank().rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    outcome = run_body(body, timeout=1.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.RETURNED, RankEnd.HUNG]
    assert "still running after 1 s; it wrote no stack" in outcome.ranks[1].cause
    assert outcome.seconds < 1.0 + 3.0


def test_a_rank_that_stops_before_it_reads_a_long_answer_does_not_block_its_server(monkeypatch) -> None:
    def body() -> None:
        current = current_rank()
        if current.rank == 1:
            current.channel.send(ExchangeRequest(1, 1, "exchange", "", pickle.dumps(None)))
            os.kill(os.getpid(), signal.SIGSTOP)
        exchange(bytes(1 << 22))
        exchange(None)

    monkeypatch.setattr(team_module, "STALL_SECONDS", 1)
    outcome = run_body(body, timeout=1.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.HUNG, RankEnd.HUNG]
    assert outcome.seconds < 2.0 + 3.0


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        (struct.pack("!i", 1000) + b"half", "it sent only the beginning of a message, and did not end"),
        (struct.pack("!i", 4) + b"none", "it sent bytes that are not a message, and did not end"),
    ],
    ids=["half a message", "no message"],
)
def test_a_rank_that_writes_into_its_control_pipe_is_named(monkeypatch, written: bytes, cause: str) -> None:
    def body() -> None:
        if current_rank().rank == 1:
            os.write(current_rank().channel._pipes.control.fileno(), written)
        wait_forever()

    monkeypatch.setattr(team_module, "STALL_SECONDS", 1)
    outcome = run_body(body)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.end, outcome.cause.cause) == (1, RankEnd.EXITED, cause)
    assert outcome.ranks[0].end is RankEnd.STOPPED


def remove_scratch_directory() -> None:
    exchange(None)  # so that every rank has finished using it
    if current_rank().rank == 0:
        shutil.rmtree(current_rank().channel._slot.scratch_dir)


def test_removing_the_scratch_directory_of_a_group_is_reported() -> None:
    def body(planted: bool) -> None:
        if planted:
            remove_scratch_directory()
            if current_rank().rank == 0:
                raise RuntimeError("planted: the stacks of the others are now dumped, which needs the directory")
            wait_forever()

    with RankServer(inherited_function=body) as server:
        with pytest.raises(WorldError, match=r"did a test remove .*\?") as caught:
            server.call(True, world_size=2, timeout=30.0, group=GroupMode.NONE)
        assert "cannot start" not in str(caught.value)
        assert server.call(False, world_size=2).values() == [None, None]


def test_pooled_ranks_without_their_scratch_directory_are_replaced() -> None:
    def body(planted: bool) -> int:
        if planted:
            remove_scratch_directory()
        return os.getpid()

    with RankServer(inherited_function=body) as server:
        first, second = (
            server.call(planted, world_size=2, timeout=5.0, group=group, isolation=Isolation.POOLED).values()
            for planted, group in ((True, GroupMode.NONE), (False, GroupMode.DEFAULT))
        )
    assert not set(first) & set(second)


def test_a_hung_rank_that_reset_the_stack_dump_signal_counts_as_hung() -> None:
    def body() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        wait_forever()

    outcome = run_body(body, timeout=0.5)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.HUNG, RankEnd.HUNG]
    assert all("still running after 0.5 s; it wrote no stack" in rank.cause for rank in outcome.ranks)


def test_a_rank_killed_by_the_stack_dump_signal_is_reported_as_such() -> None:
    def body() -> None:
        if current_rank().rank == 0:
            current_rank().channel.note(RankStatus.SKIPPED, None, time.monotonic_ns())  # so that its peer is checked
        else:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            wait_forever()

    outcome = run_body(body)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.end) == (1, RankEnd.SIGNALLED)
    assert "it did not finish in time and was killed by the stack-dump signal SIGUSR1" in outcome.cause.cause


def test_a_death_while_the_deadline_is_suspended_is_reported() -> None:
    def body() -> None:
        if current_rank().rank == 1:
            current_rank().channel.hold("debugging")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_forever()

    outcome = run_body(body)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.STOPPED, RankEnd.SIGNALLED]


def test_a_forked_child_that_returns_from_the_task_is_ended_and_reports_nothing() -> None:
    def body() -> int:
        child = os.fork()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0

    outcome = run_body(body)
    assert outcome.values() == [70, 70]
    assert all("a forked child of a rank returned from the test; it was ended" in rank.output for rank in outcome.ranks)


def test_a_daemon_that_a_rank_started_is_killed_with_the_rank(tmp_path: Path) -> None:
    def body() -> None:
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                (tmp_path / f"{os.getpid()}").touch()
                wait_forever()
            os._exit(0)
        os.waitpid(child, 0)
        while len(list(tmp_path.iterdir())) < 2:
            threading.Event().wait(0.01)

    with RankServer(inherited_function=body) as server:
        server.call(world_size=2, group=GroupMode.NONE).values()
        pids = [path.name for path in tmp_path.iterdir()]
        assert len(pids) == 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("raised", ["ImportError", "SystemExit"])
def test_a_module_that_only_ranks_can_import_is_not_imported_by_the_server(
    raised: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "of_ranks.py").write_text(f"import os\nif 'RANK' not in os.environ: raise {raised}\n")
    (tmp_path / "of_all.py").write_text("")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])

    def body() -> list[str]:
        names = ["torch.of_ranks", "torch.of_all"]  # the server cannot import the first one
        known = [name for name in names if name in sys.modules]
        for name in names:
            importlib.import_module(name)
        return known

    with RankServer(inherited_function=body) as server:
        assert server.call(world_size=1, group=GroupMode.NONE).values() == [[]]
        assert server.call(world_size=1, group=GroupMode.NONE).values() == [["torch.of_all"]]


def refuse(_: object) -> None:
    raise OSError("planted: no process")


def test_a_server_that_cannot_be_forked_leaves_no_directory_and_no_descriptor(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ForkProcess, "start", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="planted") as caught:
        RankServer()
    assert os.listdir("/proc/self/fd") == before, caught
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_cannot_be_forked_are_reported_and_leave_no_descriptor_in_the_server(
    tmp_path: Path, monkeypatch
) -> None:
    start = ForkProcess.start

    def start_one(process: ForkProcess) -> None:
        if process.name == "rank 1" and (tmp_path / "full").exists():
            refuse(process)
        start(process)

    monkeypatch.setattr(ForkProcess, "start", start_one)
    with RankServer(inherited_function=wait_forever) as server:
        counts = []
        for _ in range(2):
            (tmp_path / "full").touch()
            with pytest.raises(WorldError, match="cannot start 2 ranks: planted"):
                server.call(world_size=2, group=GroupMode.NONE)
            counts.append(len(os.listdir(f"/proc/{server._process.pid}/fd")))
            assert not any(server.scratch_dir.iterdir())
        assert counts[0] == counts[1]


def test_echo_escapes_characters_that_the_encoding_lacks(tmp_path: Path, monkeypatch) -> None:
    with (tmp_path / "terminal").open("w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "__stdout__", terminal)
        with RankServer(RankEnvironment(echo=True), lambda: print("\N{EURO SIGN} 1")) as server:  # noqa: T201 - by a rank
            server.call(world_size=1, group=GroupMode.NONE).values()
    assert (tmp_path / "terminal").read_text() == "[rank 0] \\u20ac 1\n"
