"""A Hypothesis test on several ranks: what is told when the ranks cannot stay in step."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.items.given_ranks import Ranks


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.chdir(tmp_path)
    return Ranks(tmp_path)


def test_a_strategy_that_depends_on_the_rank_is_reported(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(x=st.just(RANK // 2))
        def test_it(x):
            saw(x)
        """,
        world_size=4,
    )
    for rank in told:
        assert rank.outcomes == ["failed"]
        assert "OutOfStep: the ranks drew different examples: ranks 0-1: x=0; ranks 2-3: x=1" in rank.text
        assert len(rank.saw) == 1


def test_drawing_that_fails_on_one_rank_ends_the_test_on_all(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(x=st.integers().map(lambda x: x if RANK == 0 or x < 100 else 1 / 0))
        def test_it(x):
            saw(x)
        """
    )
    assert [rank.outcomes for rank in told] == [["failed"]] * 2
    assert "OutOfStep" in told[0].text


def test_a_rank_that_fails_before_a_draw_of_its_peers_fails_unshrunk(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(data=st.data())
        def test_it(data):
            x = data.draw(st.integers())
            saw(x)
            assert RANK == 0 or x < 7
            data.draw(st.integers())
        """
    )
    assert told[0].saw == told[1].saw
    for rank in told:
        assert rank.outcomes == ["failed"]
        assert "ExampleFailed: rank 1: AssertionError: assert" in rank.text
        assert "not shrunk" in rank.text


def test_ranks_that_draw_differently_inside_the_test_are_reported(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(data=st.data())
        def test_it(data):
            for _ in range(RANK + 1):
                saw(data.draw(st.integers()))
        """
    )
    for rank in told:
        assert rank.outcomes == ["failed"]
        assert "OutOfStep: the ranks drew differently inside the test" in rank.text


def test_an_exchange_that_a_failing_rank_never_reaches_does_not_confuse_the_verdicts(ranks: Ranks) -> None:
    told = ranks.agree(
        """
        @given(x=st.integers())
        def test_it(x, request):
            saw(x)
            if RANK == 1 and x >= 100:
                raise ValueError("before the exchange")
            exchange = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "exchange")).exchange
            assert exchange(x) == [x, x]
        """,
        outcome="failed",
    )
    assert told[0].saw[-1] == (100,)
    assert all("rank 1: ValueError: before the exchange" in rank.text for rank in told)


def test_a_rank_that_dies_ends_the_test_of_its_peers_without_shrinking(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(x=st.integers())
        def test_it(x):
            saw(x)
            if RANK == 1 and x >= 100:
                os._exit(1)
        """
    )
    assert [rank.outcomes for rank in told] == [["failed"], ["died"]]
    assert "WorldError: a peer has ended" in told[0].text
    assert sum(x >= 100 for (x,) in told[0].saw) == 1


def test_a_rank_whose_test_ends_early_is_named_to_the_others(ranks: Ranks) -> None:
    told = ranks.run(
        """
        @given(x=st.integers())
        def test_it(x):
            saw(x)
            return 5 if RANK == 1 else None
        """
    )
    assert "FailedHealthCheck" in told[1].text
    assert "rank 1: ended its test with FailedHealthCheck" in told[0].text


def test_other_tests_and_wrong_uses_of_hypothesis_are_left_alone(ranks: Ranks) -> None:
    told = ranks.run(
        """
        def test_it():
            saw(RANK)

        @given(st.integers(), st.integers())
        def test_too_many(x):
            saw(x)
        """
    )
    assert [rank.outcomes for rank in told] == [["passed", "failed"]] * 2
    assert all("Too many positional arguments" in rank.text for rank in told)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class M(RuleBasedStateMachine):\n    @rule()\n    def r(self): saw()\nTestIt = M.TestCase", "stateful"),
        ("@given(x=st.integers())\nasync def test_it(x): saw()", "async"),
    ],
)
def test_what_cannot_run_in_step_is_refused(ranks: Ranks, source: str, reason: str) -> None:
    for rank in ranks.agree(source, outcome="failed"):
        assert f"is a{'n' * (reason == 'async')} {reason} Hypothesis test" in rank.text
        assert not rank.saw
