"""A wrong weight whose step count did not go up by one says so, and other mismatches keep their hint."""

from __future__ import annotations

import pytest
import torch

from zharness.law_kit.hints import hint_step_count
from zharness.parity import Part, compare_bitwise
from zharness.parity.comparison import TensorLocation


@pytest.mark.parametrize(
    ("counts", "hint"),
    [((1.0, 7.0), "its step count went from 1 to 7"), ((1.0, 2.0), ""), ((3.0, 3.0), "its step count went from 3 to 3")],
)
def test_the_hint_names_a_wrong_step_count(counts: tuple[float, float], hint: str) -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    wrong = compare_bitwise(place, torch.zeros(1), torch.ones(1))
    before, after = ({"step": torch.tensor(count)} for count in counts)
    hinted = hint_step_count(wrong, before, after)
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == hint


def test_a_weight_without_a_count_or_a_mismatch_has_no_hint() -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    right, wrong = (compare_bitwise(place, torch.zeros(1), torch.full((1,), value)) for value in (0.0, 1.0))
    count = {"step": torch.tensor(1.0)}
    assert hint_step_count(right, count, count).mismatch is None
    assert hint_step_count(wrong, {}, {}) == wrong
