"""A rank that leaves a Hypothesis example while the other ranks wait for it, or run on."""

from __future__ import annotations

from pathlib import Path

from suites.pytest_ranks.beside_plugins import ISOLATIONS, ON_RANKS, start_beside

PLUGIN = ("_hypothesis_pytestplugin",)
HEAD = f"""
import time
import pytest, torch, torch.distributed as dist
from hypothesis import assume, example, given, settings, strategies as st
from hypothesis import HealthCheck
ranks = {ON_RANKS}
"""
LEAVES = (
    HEAD
    + """
pytestmark = pytest.mark.rank_timeout(5)

@ranks
@given(n=st.integers(500, 1000))
def test_fails_before_a_collective(rank, n):
    if rank == 1:
        assert n < 77
    dist.barrier()

@ranks
@given(n=st.just(7))
def test_rejects_before_a_collective(rank, n):
    if rank == 1:
        assume(n != 7)
    dist.barrier()

@ranks
@given(n=st.integers(500, 1000))
def test_fails_before_a_hang(rank, n):
    if rank == 1:
        raise ValueError("planted")
    while True:
        time.sleep(0.1)

@ranks
@settings(max_examples=5)
@given(n=st.integers(0, 1000))
def test_hangs_after_a_slow_example(rank, n, counter=[]):
    counter.append(n)
    if len(counter) == 1:
        time.sleep(0 if rank else 0.9)
        assume(rank == 0)
    while len(counter) > 1:
        time.sleep(0.1)

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


def test_a_hang_shows_the_example_that_a_rank_left(tmp_path: Path) -> None:
    sessions = {
        mode: start_beside(tmp_path / mode, LEAVES, f"--isolation={mode}", plugins=PLUGIN) for mode in ISOLATIONS
    }
    errors = {
        "test_fails_before_a_collective[w2]": " < 77",
        "test_rejects_before_a_collective[w2]": "UnsatisfiedAssumption",
        "test_fails_before_a_hang[w2]": "ValueError: planted",
    }
    for mode, session in sessions.items():
        done = session.finish()
        assert done.verdicts() == {
            **dict.fromkeys(errors, "call failed"),
            "test_hangs_after_a_slow_example[w2]": "call failed",
            "test_after[w2]": "passed",
        }, f"{mode}: {done.output}"
        assert not done.leftovers, mode
        for name, error in errors.items():
            (hung,) = (report for report in done.tests[name].reports if report.outcome == "failed")
            assert "rank 1 left the example n=" in hung.text, f"{mode}: {hung.text}"
            assert error in hung.text, f"{mode}: {hung.text}"
        (both,) = (r for r in done.tests["test_hangs_after_a_slow_example[w2]"].reports if r.outcome == "failed")
        assert "left the example" not in both.text, f"{mode}: {both.text}"


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
