"""``zharness tour`` runs its cells, shows what each one found, and notices a broken engine that passes."""

from __future__ import annotations

import pytest

from zharness import tour
from zharness.mutants import MUTANTS
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.tour import EXHIBITS, MUTANT_PREFIX, Exhibit, run_tour


def test_the_tour_shows_a_law_that_holds_the_broken_engines_and_a_known_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tour(prepare_rank_environment) == 0
    shown = capsys.readouterr().out
    assert (shown.count("-> PASS"), shown.count("-> FAIL")) == (1, len(EXHIBITS) - 1)
    assert shown.count("again: zharness check '") == len(EXHIBITS)
    assert "known as pytorch/pytorch#47260" in shown


def test_a_broken_engine_that_passes_is_a_failure_of_the_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = f"training.grads[{MUTANT_PREFIX}norm_of_its_own_shard-zero2-w2-fp32-mlp]"
    monkeypatch.setattr(tour, "EXHIBITS", (Exhibit(unseen),))
    assert run_tour(prepare_rank_environment) == 1


def test_each_exhibit_says_what_is_seen() -> None:
    assert all(exhibit.describe() for exhibit in EXHIBITS)
    assert MUTANTS["norm_of_its_own_shard"].description in EXHIBITS[2].describe()
