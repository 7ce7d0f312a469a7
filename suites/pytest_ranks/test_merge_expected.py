"""Merged reports of skips and expected failures: they never hide the failure of another rank."""

from __future__ import annotations

import pytest

from suites.pytest_ranks.simulated_ranks import (
    CALL_FAILED,
    KILLED,
    PASSED,
    SETUP_FAILED,
    SITE,
    STOPPED,
    RunTest,
    make_end,
    make_run_test,
)
from zharness.world.outcome import RankEnd


@pytest.fixture
def run_test(tmp_path, capsys, monkeypatch) -> RunTest:
    return make_run_test(tmp_path, capsys, monkeypatch)


def test_a_skip_on_every_rank_is_one_skip(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank): pytest.skip('no gpu')")
    assert ranks.outcomes == {**PASSED, "call": "skipped"}
    assert ranks.report("call").longrepr[2] == "Skipped: no gpu"
    assert "SKIPPED [1] test_simulated" in ranks.text
    assert "1 skipped in" in ranks.text


def test_a_skip_in_setup_has_no_call(run_test: RunTest) -> None:
    ranks = run_test("@pytest.mark.skip(reason='later')\ndef test_it(rank): pass")
    assert ranks.outcomes == {"setup": "skipped", "teardown": "passed"}


def test_a_skip_contains_the_different_reasons_of_all_ranks(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank): pytest.skip('odd' if rank == 1 else 'even')", 3)
    assert ranks.report("call").longrepr[2] == "Skipped: even (ranks 0, 2), odd (rank 1)"


SKIPS_ON_1 = """
    def test_it(rank):
        if rank == 1: pytest.skip('no gpu')
        assert rank != 2
"""


def test_a_skip_on_some_ranks_only_is_a_failure(run_test: RunTest) -> None:
    ranks = run_test(SKIPS_ON_1)
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message() == "skipped on rank 1 of 2 only: no gpu; rank 0 passed"
    stopped = run_test(SKIPS_ON_1, ends={0: STOPPED})
    assert stopped.message() == f"skipped on rank 1 of 2 only: no gpu; rank 0 was stopped, waiting in {SITE}"
    assert stopped.report("call").longrepr.reprcrash.lineno == 5, "where it skipped"


@pytest.mark.parametrize(("at_ns", "message"), [(1, "rank 2: assert 2 != 2"), (30, "skipped on rank 1 of 3 only: ")])
def test_the_earlier_of_a_skip_and_a_failure_is_the_cause(run_test: RunTest, at_ns: int, message: str) -> None:
    assert run_test(SKIPS_ON_1, 3, clock={(2, "call"): at_ns}).message().startswith(message)


def xfail(mark: str, body: str) -> str:
    return f"@pytest.mark.xfail({mark})\ndef test_it(rank):\n    {body}"


def test_an_expected_failure_on_one_rank_makes_the_test_xfailed(run_test: RunTest) -> None:
    for strict in (True, False):
        ranks = run_test(xfail(f"reason='known', strict={strict}", "assert rank == 0"))
        assert ranks.outcomes == {**PASSED, "call": "xfailed"}
        assert ranks.report("call").wasxfail == "known"
        assert "1 xfailed in" in ranks.text


def test_ranks_that_wait_for_a_rank_that_failed_as_expected_are_no_failures(run_test: RunTest) -> None:
    source = xfail("reason='known', raises=AssertionError", "assert rank == 0")
    waits = make_end(RankEnd.HUNG, "setup", phase="call", site=SITE)
    for end in (STOPPED, waits):
        assert run_test(source, ends={0: end}).outcomes["call"] == "xfailed"
    assert run_test(source, ends={0: {**waits, "site": ""}}).outcomes["call"] == "failed"


def test_a_failure_that_the_xfail_mark_does_not_expect_fails_the_test(run_test: RunTest) -> None:
    ranks = run_test(xfail("raises=ValueError", "raise ValueError() if rank == 0 else RuntimeError('other')"))
    assert ranks.message() == "rank 1: RuntimeError: other"
    assert "rank 0 failed as expected in call: ValueError" in ranks.section("Ranks")


def test_an_expected_failure_in_setup_does_not_hide_a_failure_in_the_call_of_another_rank(
    run_test: RunTest,
) -> None:
    ranks = run_test("""
        @pytest.fixture
        def thing(rank):
            if rank == 0: pytest.xfail("known")
        def test_it(thing, rank): raise ValueError("real")
    """)
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message() == "rank 1: ValueError: real"


def test_an_expected_failure_in_teardown_does_not_hide_a_strict_xpass(run_test: RunTest) -> None:
    ranks = run_test("""
        @pytest.fixture
        def thing(rank):
            yield
            raise ValueError
        @pytest.mark.xfail(strict=True)
        def test_it(thing, rank): pass
    """)
    assert ranks.outcomes == {**CALL_FAILED, "teardown": "xfailed"}


def test_a_test_that_passes_unexpectedly_on_every_rank_is_xpassed(run_test: RunTest) -> None:
    assert run_test(xfail("reason='known'", "pass")).outcomes == {**PASSED, "call": "xpassed"}
    strict = run_test(xfail("reason='known', strict=True", "pass"))
    assert strict.outcomes == CALL_FAILED
    assert strict.report("call").longrepr == "[XPASS(strict)] known"


@pytest.mark.parametrize(
    "end", [KILLED, make_end(RankEnd.HUNG, "setup", phase="call", cause="still running after 9 s")]
)
def test_a_crash_or_a_hang_is_xfailed_if_the_mark_expects_any_failure(
    run_test: RunTest, end: dict[str, object]
) -> None:
    ranks = run_test(xfail("reason='known', strict=True", "pass"), ends={1: end})
    assert ranks.outcomes == {**PASSED, "call": "xfailed"}
    assert ranks.report("call").wasxfail == "known"
    for mark in ("raises=ValueError", "False, reason='elsewhere'"):
        assert run_test(xfail(mark, "pass"), ends={1: end}).outcomes["call"] == "failed"
    assert run_test(xfail("", "pass"), ends={1: end}, args=["--runxfail"]).outcomes["call"] == "failed"


def test_xfail_without_run_does_not_expect_a_crash(run_test: RunTest) -> None:
    assert run_test(xfail("run=False", "pass")).outcomes == {"setup": "xfailed", "teardown": "passed"}
    end = make_end(RankEnd.EXITED, phase="setup", cause="exit status 1")
    assert run_test(xfail("run=False", "pass"), ends={0: end, 1: end}).outcomes == SETUP_FAILED
