"""A rank that leaves a Hypothesis example while the other ranks wait for it in a collective."""

from __future__ import annotations

from pathlib import Path

from suites.pytest_ranks.beside_plugins import ISOLATIONS, ON_RANKS, start_beside

PLUGIN = ("_hypothesis_pytestplugin",)
LEAVES = f"""
import time
import pytest, torch, torch.distributed as dist
from hypothesis import assume, given, settings, strategies as st
ranks = {ON_RANKS}

@ranks
@given(n=st.integers(0, 1000))
def test_fails_before_a_collective(rank, n):
    if rank == 1:
        assert n < 77
    dist.barrier()

@ranks
@given(n=st.integers(0, 1000))
def test_rejects_before_a_collective(rank, n):
    if rank == 1:
        assume(n % 7)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2

@ranks
@pytest.mark.rank_timeout(5)
@settings(max_examples=5)
@given(n=st.integers(500, 1000))
def test_fails_before_a_hang(rank, n):
    if rank == 1:
        raise ValueError("planted")
    while True:
        time.sleep(0.1)

@ranks
def test_after():
    dist.barrier()
"""


def test_peers_in_a_collective_are_interrupted_and_the_example_is_shrunk(tmp_path: Path) -> None:
    sessions = {
        mode: start_beside(tmp_path / mode, LEAVES, f"--isolation={mode}", plugins=PLUGIN) for mode in ISOLATIONS
    }
    for mode, session in sessions.items():
        done = session.finish()
        assert done.verdicts() == {
            "test_fails_before_a_collective[w2]": "call failed",
            "test_rejects_before_a_collective[w2]": "passed",
            "test_fails_before_a_hang[w2]": "call failed",
            "test_after[w2]": "passed",
        }, f"{mode}: {done.output}"
        (shrunk,) = (r for r in done.tests["test_fails_before_a_collective[w2]"].reports if r.outcome == "failed")
        assert "rank 1: AssertionError: assert 77 < 77" in shrunk.headline, f"{mode}: {shrunk.text}"
        assert "n=77" in shrunk.text, f"{mode}: {shrunk.text}"
        assert "Connection closed" not in shrunk.text, f"{mode}: {shrunk.text}"
        (hung,) = (r for r in done.tests["test_fails_before_a_hang[w2]"].reports if r.outcome == "failed")
        assert "rank 1 left the example n=" in hung.text, f"{mode}: {hung.text}"
        assert "ValueError: planted" in hung.text, f"{mode}: {hung.text}"
        assert not done.leftovers, mode
