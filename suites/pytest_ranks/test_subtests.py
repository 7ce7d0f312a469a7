"""Subtests on ranks: one report for each subtest, with the verdict that it would have without ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suites.pytest_ranks.beside_plugins import run_beside

BUILT_IN = () if pytest.version_tuple >= (9,) else ("pytest_subtests",)  # part of pytest since 9

SUBTESTS = """
import unittest

@ranks
def test_later_subtests_pass(subtests):
    for i in range(3):
        with subtests.test("planted", i=i):
            assert i != 1

@ranks
def test_all_pass(subtests):
    for name in ("a", "b"):
        with subtests.test(name=name):
            dist.is_initialized()

@ranks
def test_skips_and_fails(subtests):
    with subtests.test("skips"):
        pytest.skip("planted")
    with subtests.test("fails"):
        raise ValueError("planted")
    with subtests.test("twice"):
        pass
    with subtests.test("twice"):
        raise KeyError("planted")
    raise RuntimeError("the test itself")

@ranks
class TestOfUnittest(unittest.TestCase):
    def test_it(self):
        for i in range(3):
            with self.subTest(i=i):
                assert i != 1

@ranks
def test_after():
    pass
"""


@pytest.fixture(autouse=True)
def require_subtests() -> None:
    for plugin in BUILT_IN:
        pytest.importorskip(plugin)


def test_subtests_have_the_verdicts_that_they_have_without_ranks(tmp_path: Path) -> None:
    beside = run_beside(tmp_path, SUBTESTS, plugins=BUILT_IN)
    beside.assert_same_verdicts()
    for mode, session in beside.on_ranks.items():
        # On a busy machine a rank may be stopped before its subtests, once the other rank has failed.
        summary = r"\[planted\] \(i=1\) test_it.py::test_later_subtests_pass\[w2\] - ranks? [01-]+: assert 1 != 1"
        assert re.search(summary, session.output), session.output
        assert "(i=2)" not in session.output, mode
        assert "[rank 0] u" not in session.output, "the progress that pytest shows is not the rank's to print"


def test_a_subtest_that_fails_on_one_rank_names_it(tmp_path: Path) -> None:
    source = """
        @ranks
        def test_it(subtests, rank):
            for number in range(3):
                with subtests.test("planted", number=number):
                    assert (rank, number) != (1, 1)
            dist.barrier()
    """
    for mode, session in run_beside(tmp_path, source, plugins=BUILT_IN, without="").on_ranks.items():
        reports = session.tests["test_it[w2]"].reports
        failed = [report for report in reports if report.outcome == "failed"]
        assert len(failed) == 2, f"{mode}, the subtest and the test: {session.output}"
        assert failed[0].headline.startswith("rank 1: assert (1, 1) != (1, 1)"), mode
        assert "rank 0 passed" in failed[0].text, mode
        assert "rank 1: contains 1 failed subtest" in failed[1].headline, mode
        assert "number=1" in session.output, mode


def test_subtests_before_a_hang_are_reported(tmp_path: Path) -> None:
    source = """
        @ranks
        @pytest.mark.rank_timeout(2)
        def test_it(subtests, rank=0):
            for number in range(2):
                with subtests.test(number=number):
                    assert number != 1
            if dist.is_initialized() and dist.get_rank() == 1:
                dist.barrier()
    """
    for mode, session in run_beside(tmp_path, source, plugins=BUILT_IN).on_ranks.items():
        headlines = [report.headline for report in session.tests["test_it[w2]"].reports]
        assert any(": assert 1 != 1" in headline for headline in headlines), f"{mode}: {headlines}"
        assert any("contains 1 failed subtest" in headline for headline in headlines), f"{mode}: {headlines}"
