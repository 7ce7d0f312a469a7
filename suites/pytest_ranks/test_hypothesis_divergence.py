"""A Hypothesis test on several ranks: the errors when the ranks run different examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.pytest_ranks.hypothesis_ranks import RankProcesses


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankProcesses:
    monkeypatch.chdir(tmp_path)
    return RankProcesses(tmp_path)


def test_a_strategy_that_depends_on_the_rank_is_reported(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(x=st.just(RANK // 2))
        def test_it(x):
            record(x)
        """,
        world_size=4,
    )
    for rank in logs:
        assert rank.outcomes == ["failed"]
        assert "ExamplesDiverged: the ranks drew different examples: ranks 0-1: x=0; ranks 2-3: x=1" in rank.text
        assert len(rank.examples) == 1


def test_drawing_that_fails_on_one_rank_ends_the_test_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(x=st.integers().map(lambda x: x if RANK == 0 or x < 100 else 1 / 0))
        def test_it(x):
            record(x)
        """
    )
    assert [rank.outcomes for rank in logs] == [["failed"]] * 2
    assert "ExamplesDiverged" in logs[0].text


def test_a_failure_before_a_draw_of_other_ranks_is_not_shrunk(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(data=st.data())
        def test_it(data):
            x = data.draw(st.integers())
            record(x)
            assert RANK == 0 or x < 7
            data.draw(st.integers())
        """
    )
    assert logs[0].examples == logs[1].examples
    for rank in logs:
        assert rank.outcomes == ["failed"]
        assert "ExampleFailed: rank 1: AssertionError: assert" in rank.text
        assert "not shrunk" in rank.text


def test_ranks_that_draw_differently_inside_the_test_are_reported(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(data=st.data())
        def test_it(data):
            for _ in range(RANK + 1):
                record(data.draw(st.integers()))
        """
    )
    for rank in logs:
        assert rank.outcomes == ["failed"]
        assert "ExamplesDiverged: the ranks drew different values inside the test" in rank.text


def test_a_rank_may_fail_before_an_exchange_of_the_test(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x, request):
            record(x)
            if RANK == 1 and x >= 100:
                raise ValueError("before the exchange")
            exchange = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "exchange")).exchange
            assert exchange(x) == [x, x]
        """,
        outcome="failed",
    )
    assert logs[0].examples[-1] == (100,)
    assert all("rank 1: ValueError: before the exchange" in rank.text for rank in logs)


def test_a_rank_that_dies_ends_the_test_of_its_peers_without_shrinking(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            if RANK == 1 and x >= 100:
                os._exit(1)
        """
    )
    assert [rank.outcomes for rank in logs] == [["failed"], ["died"]]
    assert "WorldError: a peer has ended" in logs[0].text
    assert sum(x >= 100 for (x,) in logs[0].examples) == 1


def test_the_other_ranks_name_a_rank_whose_test_ends_early(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            return 5 if RANK == 1 else None
        """
    )
    assert "FailedHealthCheck" in logs[1].text
    assert "rank 1: ended its test with FailedHealthCheck" in logs[0].text


def test_other_tests_and_wrong_uses_of_given_are_unchanged(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        def test_it():
            record(RANK)

        @given(st.integers(), st.integers())
        def test_too_many(x):
            record(x)
        """
    )
    assert [rank.outcomes for rank in logs] == [["passed", "failed"]] * 2
    assert all("Too many positional arguments" in rank.text for rank in logs)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class M(RuleBasedStateMachine):\n    @rule()\n    def r(self): record()\nTestIt = M.TestCase", "stateful"),
        ("@given(x=st.integers())\nasync def test_it(x): record()", "async"),
    ],
)
def test_stateful_and_async_tests_are_refused(ranks: RankProcesses, source: str, reason: str) -> None:
    for rank in ranks.run_equal(source, outcome="failed"):
        assert f"is a{'n' * (reason == 'async')} {reason} Hypothesis test" in rank.text
        assert not rank.examples
