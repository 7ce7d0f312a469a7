"""Bisection of releases: number of runs, skipped releases, refused arguments."""

from __future__ import annotations

import math

import pytest

from zharness.errors import UsageError
from zharness.releases.bisect import BisectResult, BisectStep, Outcome, bisect, describe_bisect_result, describe_step

GOOD, BAD, SKIPPED = Outcome.GOOD, Outcome.BAD, Outcome.SKIPPED


class Shop:
    """Releases 0 to ``count - 1``, of which those from ``turn`` on show the other outcome."""

    def __init__(self, count: int, turn: int, oldest: Outcome = GOOD, skipped: tuple[int, ...] = ()) -> None:
        self.releases = [str(number) for number in range(count)]
        self.turn, self.oldest, self.skipped = turn, oldest, skipped
        self.asked: list[str] = []
        self.steps: list[BisectStep] = []

    def trial(self, release: str) -> tuple[Outcome, str]:
        self.asked.append(release)
        if int(release) in self.skipped:
            return SKIPPED, "it does not import"
        newest = BAD if self.oldest is GOOD else GOOD
        return (self.oldest if int(release) < self.turn else newest), ""

    def find(self) -> BisectResult:
        return bisect(self.releases, self.oldest, self.trial, self.steps.append)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 61])
@pytest.mark.parametrize("oldest", [GOOD, BAD], ids=["first bad", "first good"])
def test_the_release_where_it_turns_is_found_in_as_many_runs_as_halving_takes(count: int, oldest: Outcome) -> None:
    for turn in range(1, count):
        shop = Shop(count, turn, oldest)
        found = shop.find()
        assert (found.last_before, found.first_after) == (str(turn - 1), str(turn))
        assert found.new_outcome is (BAD if oldest is GOOD else GOOD)
        assert len(shop.asked) == len(set(shop.asked)) == len(shop.steps) == found.run_count
        assert found.run_count <= 2 + math.ceil(math.log2(count - 1))


def test_releases_that_show_neither_are_stepped_over() -> None:
    shop = Shop(16, 11, skipped=(6, 7, 8))
    found = shop.find()
    assert (found.last_before, found.first_after, found.skipped) == ("10", "11", ())
    assert found.run_count <= 2 + 3 + 4


def test_where_the_turn_lies_among_skipped_releases_all_of_them_are_named() -> None:
    found = Shop(10, 5, skipped=(4, 5)).find()
    assert (found.last_before, found.first_after, found.skipped) == ("3", "6", ("4", "5"))
    assert describe_bisect_result(found).startswith("the first bad release is one of 4, 5, 6 ")


@pytest.mark.parametrize(
    ("turn", "named"),
    [(0, "0 was given as good, but is bad; name two"), (9, "8 was given as bad, but is good; name two")],
)
def test_ends_that_do_not_differ_as_told_are_refused_after_two_runs_at_most(turn: int, named: str) -> None:
    shop = Shop(9, turn)
    with pytest.raises(UsageError, match=named):
        shop.find()
    assert len(shop.asked) <= 2


def test_an_end_that_cannot_be_run_is_refused_with_its_reason() -> None:
    with pytest.raises(UsageError, match="0 was given as good, but is skipped: it does not import"):
        Shop(9, 4, skipped=(0,)).find()


def test_every_run_is_told_with_what_is_left() -> None:
    shop = Shop(5, 2, skipped=(2,))
    shop.find()
    assert [describe_step(step) for step in shop.steps] == [
        "0: good (3 left between)",
        "4: bad (3 left between)",
        "2: skipped (2 left between): it does not import",
        "1: good (1 left between)",
        "3: bad (none left between)",
    ]
