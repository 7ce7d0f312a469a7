"""A Hypothesis test on several ranks: the same examples, one verdict and the same minimal failure on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.pytest_ranks.hypothesis_ranks import RankProcesses


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankProcesses:
    monkeypatch.chdir(tmp_path)
    return RankProcesses(tmp_path)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_passing_test_runs_the_same_examples_on_every_rank(ranks: RankProcesses, world_size: int) -> None:
    source = """
        @settings(max_examples=40)
        @given(x=st.integers(), flags=st.lists(st.booleans()))
        def test_it(x, flags):
            record(x, flags)
    """
    seen = ranks.run_equal(source, world_size=world_size)[0].examples
    assert len(seen) == 40
    assert ranks.run_equal(source, world_size=world_size)[0].examples == seen  # the next run has the same examples


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_failure_on_one_rank_shrinks_to_the_same_minimum_on_all(ranks: RankProcesses, world_size: int) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers(), y=st.integers())
        def test_it(x, y):
            record(x, y)
            if RANK == 1 and x >= 100:
                raise ValueError(f"too much: {x}")
        """,
        world_size=world_size,
        outcome="failed",
    )
    assert logs[0].examples[-1] == (100, 0)
    for rank in logs:
        assert "ExampleFailed: rank 1: ValueError: too much: 100" in rank.text
        assert "x=100" in rank.text
        assert "in test_it" in rank.text, "the traceback of the rank that failed"


def test_ranks_that_fail_in_different_ways_are_each_named(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            try:
                assert x < 50
            except AssertionError:
                if RANK == 3:
                    raise
                raise ValueError("early") from None
        """,
        world_size=4,
        outcome="failed",
    )
    assert logs[0].examples[-1] == (50,)
    assert all("ranks 0-2: ValueError: early; rank 3: AssertionError: assert 50 < 50" in rank.text for rank in logs)


def test_a_failure_with_an_exception_context_on_one_rank_only_is_one_failure(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            if x >= 10 and RANK == 0:
                try:
                    {}[x]
                except KeyError:
                    raise RuntimeError("lost")
            if x >= 10:
                raise RuntimeError("lost")
        """,
        outcome="failed",
    )
    assert logs[1].examples[-1] == (10,)
    assert all("ranks 0-1: RuntimeError: lost" in rank.text for rank in logs)


def test_a_failure_on_all_ranks_is_shown_unchanged(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            assert x < 1000
        """,
        outcome="failed",
    )
    assert logs[0].examples[-1] == (1000,)
    assert all("assert 1000 < 1000" in rank.text and "ExampleFailed" not in rank.text for rank in logs)


def test_an_assumption_that_fails_on_one_rank_rejects_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @settings(max_examples=30)
        @given(x=st.integers())
        def test_it(x):
            record(x)
            if RANK == 1:
                assume(x % 2 == 0)
        """
    )
    assert sum(x % 2 == 0 for (x,) in logs[0].examples) == 30
    assert len(logs[0].examples) > 30


def test_an_unsatisfiable_assumption_on_one_rank_is_unsatisfiable_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            assume(RANK == 0)
        """,
        outcome="failed",
    )
    assert all("Unsatisfiable" in rank.text or "FailedHealthCheck" in rank.text for rank in logs)


def test_examples_whose_reprs_differ_only_in_addresses_are_equal(ranks: RankProcesses) -> None:
    ranks.run_equal(
        """
        class Thing:
            pass

        hold = [Thing() for _ in range(1000 * RANK)]

        @given(x=st.builds(Thing))
        def test_it(x):
            record()
        """
    )


def test_values_drawn_with_data_are_the_same_and_shrink_together(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(data=st.data())
        def test_it(data):
            x = data.draw(st.integers())
            y = data.draw(st.lists(st.integers().filter(lambda y: y % 3 == 0)))
            record(x, y)
            assert RANK == 0 or x < 7 or not y
        """,
        outcome="failed",
    )
    assert logs[0].examples[-1] == (7, [0])


def test_a_derandomized_test_keeps_its_examples(ranks: RankProcesses) -> None:
    source = "@given(x=st.integers())\ndef test_it(x):\n    record(x)\n"
    derandomized = ranks.run_equal(f"@settings(derandomize=True, max_examples=20)\n{source}")[0].examples
    assert derandomized == ranks.run_equal(f"@settings(derandomize=True, max_examples=20)\n{source}")[0].examples
    assert derandomized != ranks.run_equal(source)[0].examples


def test_a_seed_gives_the_same_examples_for_another_test_name(ranks: RankProcesses) -> None:
    source = "@settings(max_examples=20)\n@given(x=st.integers())\ndef test_it(x):\n    record(x)\n"
    other = source.replace("test_it", "test_other")
    by_mark = ranks.run_equal(f"@seed(5)\n{source}")[0].examples
    assert by_mark == ranks.run_equal(f"@seed(5)\n{other}")[0].examples
    assert by_mark == ranks.run_equal(source, "--hypothesis-seed=5")[0].examples
    assert by_mark == ranks.run_equal(other, "--hypothesis-seed=5")[0].examples
    assert ranks.run_equal(source)[0].examples != ranks.run_equal(other)[0].examples


def test_a_skip_on_one_rank_skips_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            if RANK == 1 and x > 10:
                pytest.skip("too large here")
        """,
        outcome="skipped",
    )
    assert "rank 1: Skipped: too large here" in logs[0].text


def test_an_expected_failure_on_one_rank_is_expected_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @given(x=st.integers())
        def test_it(x):
            record(x)
            if RANK == 1 and x > 10:
                pytest.xfail("known")
        """,
        outcome="skipped",
    )
    assert logs[0].examples[-1] == (11,)


def test_explicit_examples_run_first_and_may_be_expected_to_fail(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @settings(max_examples=10)
        @example(x=-5)
        @example(x=2**70).xfail(raises=ValueError)
        @given(x=st.integers(0, 9))
        def test_it(x):
            record(x)
            if x > 2**60:
                raise ValueError(x)
        """
    )
    assert (-5,) in logs[0].examples[:2]
    assert (2**70,) in logs[0].examples[:2]


def test_an_explicit_example_that_fails_on_one_rank_fails_on_all(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @example(x=-5)
        @given(x=st.integers(0, 9))
        def test_it(x):
            record(x)
            assert RANK == 0 or x >= 0
        """,
        outcome="failed",
    )
    assert logs[0].examples == [(-5,)]
    assert all("rank 1: AssertionError: assert" in rank.text for rank in logs)


def test_fixtures_may_differ_between_ranks_in_parametrized_methods(ranks: RankProcesses) -> None:
    logs = ranks.run(
        """
        @pytest.fixture(scope="module")
        def place(tmp_path_factory):
            return tmp_path_factory.mktemp(f"rank-{RANK}")

        class TestIt:
            @pytest.mark.parametrize("kind", ["a", "b"])
            @settings(max_examples=20)
            @given(x=st.integers())
            def test_it(self, place, kind, x):
                assert place.name.startswith(f"rank-{RANK}")
                record(kind, x)
        """
    )
    assert [rank.outcomes for rank in logs] == [["passed", "passed"]] * 2
    assert logs[0].examples == logs[1].examples
    assert [kind for kind, _ in logs[0].examples] == ["a"] * 20 + ["b"] * 20


def test_scores_that_differ_between_ranks_lead_to_the_same_examples(ranks: RankProcesses) -> None:
    logs = ranks.run_equal(
        """
        @settings(max_examples=300)
        @given(x=st.integers(), y=st.floats(0, 1), z=st.lists(st.integers()))
        def test_it(x, y, z):
            hypothesis.target(hash((x, y)) % (97 + RANK))
            record(x, y, z)
        """
    )
    assert len(logs[0].examples) == 300


def test_a_module_imported_on_one_rank_only_changes_no_example(ranks: RankProcesses) -> None:
    (ranks.directory / "numbers_of_mine.py").write_text(f"CONSTANTS = {[7**power for power in range(20, 60)]}")
    logs = ranks.run_equal(
        """
        @settings(max_examples=300)
        @given(x=st.integers(), y=st.integers())
        def test_it(x, y):
            if RANK == 1:
                import numbers_of_mine
            record(x, y)
        """
    )
    assert len(logs[0].examples) == 300
