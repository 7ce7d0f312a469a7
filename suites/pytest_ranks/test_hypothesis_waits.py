"""A rank that leaves a Hypothesis example while the other ranks wait for it, or run on: one verdict per example."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.pytest_ranks.beside_plugins import ISOLATIONS, ON_RANKS, start_beside

PLUGIN = ("_hypothesis_pytestplugin",)
LEFT_AFTER_DRAW = "a rank left an example in which it had drawn values inside the test, while other ranks waited"
HEAD = f"""
import time
import pytest, torch, torch.distributed as dist
from hypothesis import assume, example, given, settings, strategies as st
from hypothesis import HealthCheck
ranks = {ON_RANKS}
counter = []
"""
LEAVES = (
    HEAD
    + """
@ranks
@settings(max_examples=20)
@given(n=st.integers(0, 9), letters=st.sampled_from(["a", "b"]))
def test_fails_before_a_collective(rank, n, letters):
    dist.all_reduce(torch.ones(1))
    if rank == 1 and letters == "b":
        assert n < 3
    dist.barrier()

@ranks
@settings(max_examples=3)
@given(n=st.integers(0, 3))
def test_fails_before_backward_of_ddp(rank, n):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        raise ValueError("planted")
    loss.backward()

@ranks
@settings(max_examples=5)
@given(n=st.sampled_from([7, 8, 9]))
def test_rejects_before_a_collective(rank, n):
    if rank == 1:
        assume(n != 7)
    dist.barrier()

@ranks
@given(n=st.just(7))
def test_rejects_every_example(rank, n):
    if rank == 1:
        assume(n != 7)
    dist.barrier()

@ranks
@settings(max_examples=5)
@given(data=st.data())
def test_draws_inside_the_test(rank, data):
    n = data.draw(st.integers(0, 9))
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()

@ranks
@settings(max_examples=5)
@given(data=st.data())
def test_rejects_after_a_draw(rank, data):
    n = data.draw(st.sampled_from([7, 8, 9]))
    if rank == 1:
        assume(n == 0)
    dist.barrier()

@ranks
@settings(max_examples=5)
@example(n=2)
@given(n=st.just(1))
def test_fails_before_a_hang(rank, n):
    if rank == 1 and n == 2:
        raise ValueError("planted")
    while n == 2:
        time.sleep(0.1)

@ranks
@pytest.mark.rank_timeout(3)
@settings(max_examples=5)
@given(n=st.integers(0, 1000))
def test_hangs_after_a_slow_example(rank, n):
    counter.append(n)
    if len(counter) == 1:
        time.sleep(0 if rank else 0.9)
        assume(rank == 0)
    while len(counter) > 1:
        time.sleep(0.1)

@ranks
@settings(max_examples=5)
@given(n=st.integers(0, 3))
def test_returns_before_a_collective(rank, n):
    if rank == 0 and n > 1:
        return
    dist.barrier()

@pytest.mark.world_size(3)
@settings(max_examples=3)
@given(n=st.sampled_from([5, 7]))
def test_leaves_two_of_three_ranks(rank, n):
    if rank == 1:
        assert n < 7
    if rank == 2 and n == 7:
        return
    dist.barrier()

@ranks
@settings(max_examples=5)
@given(n=st.integers())
def test_uses_given_wrongly(n, other=1):
    pass

@ranks
def test_after():
    dist.barrier()
"""
)
RUNS_ON = (
    HEAD
    + """
@pytest.fixture
def group():
    return dist.new_group([0, 1])

@ranks
@settings(max_examples=5)
@example(n=7)
@given(n=st.integers(0, 1000))
def test_fails_with_a_broken_pipe(rank, n):
    if rank == 1 and n == 7:
        raise RuntimeError("the worker is gone: Broken pipe")

@ranks
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@example(n=0)
@given(n=st.integers(0, 1000))
def test_rejects_later_on_one_rank(group, rank, n):
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    if rank == 1 and n == 0:
        time.sleep(0.9)
    assume(n != 0)
    assert value.item() == 2

@ranks
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@example(n=0)
@given(n=st.integers(0, 1000))
def test_fails_later_on_one_rank(group, rank, n):
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1 and n == 0:
        time.sleep(0.9)
    assert n != 0
"""
)


@pytest.mark.exhaustive
def test_an_example_that_a_rank_leaves_has_one_verdict_and_is_shrunk(tmp_path: Path) -> None:
    sessions = {
        mode: start_beside(tmp_path / mode, LEAVES, f"--isolation={mode}", plugins=PLUGIN) for mode in ISOLATIONS
    }
    shown = {
        "test_fails_before_a_collective[w2]": ("rank 1: AssertionError: assert 3 < 3", "letters='b'", "n=3,"),
        "test_fails_before_backward_of_ddp[w2]": ("rank 0: ValueError: planted", "n=0,"),
        "test_rejects_every_example[w2]": ("Unsatisfiable",),
        "test_draws_inside_the_test[w2]": ("rank 1: ValueError: planted", LEFT_AFTER_DRAW),
        "test_rejects_after_a_draw[w2]": (
            "rank 1: UnsatisfiedAssumption",
            "rank 0: waited in barrier",
            LEFT_AFTER_DRAW,
        ),
        "test_fails_before_a_hang[w2]": ("rank 1: ValueError: planted", "n=2,"),
        "test_hangs_after_a_slow_example[w2]": ("did not finish in time",),
        "test_returns_before_a_collective[w2]": (
            "rank 0: had returned from the test; rank 1: waited in barrier",
            "n=2,",
        ),
        "test_leaves_two_of_three_ranks[w3]": ("rank 1: AssertionError: assert 7 < 7", "n=7,", "rank 0: waited in"),
        "test_uses_given_wrongly[w2]": ("InvalidArgument",),
    }
    for mode, session in sessions.items():
        done = session.finish()
        assert done.verdicts() == {
            **dict.fromkeys(shown, "call failed"),
            "test_rejects_before_a_collective[w2]": "passed",
            "test_after[w2]": "passed",
        }, f"{mode}: {done.output}"
        assert not done.leftovers, mode
        for name, texts in shown.items():
            (failed,) = (report for report in done.tests[name].reports if report.outcome == "failed")
            for text in texts:
                assert text in failed.text, f"{mode}: {failed.text}"
            assert "left the example" not in failed.text, f"{mode}: {failed.text}"
            assert "ExamplesDiverged" not in failed.text, f"{mode}: {failed.text}"
        (shrunk,) = (r for r in done.tests["test_fails_before_a_collective[w2]"].reports if r.outcome == "failed")
        assert shrunk.headline == "rank 1: AssertionError: assert 3 < 3", mode
        assert "rank 0: waited in barrier" in shrunk.text, mode


def test_an_example_that_one_rank_leaves_earlier_has_the_common_outcome(tmp_path: Path) -> None:
    sessions = {
        mode: start_beside(tmp_path / mode, RUNS_ON, f"--isolation={mode}", plugins=PLUGIN) for mode in ISOLATIONS
    }
    for mode, session in sessions.items():
        done = session.finish()
        assert done.verdicts() == {
            "test_fails_with_a_broken_pipe[w2]": "call failed",
            "test_rejects_later_on_one_rank[w2]": "passed",
            "test_fails_later_on_one_rank[w2]": "call failed",
        }, f"{mode}: {done.output}"
        (failed,) = (r for r in done.tests["test_fails_with_a_broken_pipe[w2]"].reports if r.outcome == "failed")
        assert "rank 1: RuntimeError: the worker is gone: Broken pipe" in failed.text, f"{mode}: {failed.text}"
        (late,) = (r for r in done.tests["test_fails_later_on_one_rank[w2]"].reports if r.outcome == "failed")
        assert "assert 0 != 0" in late.text, f"{mode}: {late.text}"
