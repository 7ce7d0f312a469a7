"""Hints name a wrong step count, a wrong learning rate and other gradients' norm, and nothing else."""

from __future__ import annotations

import pytest
import torch

from zharness.law_kit.clipping import hint_other_norm
from zharness.law_kit.hints import add_hint, hint_learning_rate, hint_step_count
from zharness.parity import Part, compare_bitwise
from zharness.parity.comparison import TensorLocation


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        ((1.0, 7.0), "its step count went from 1 to 7"),
        ((1.0, 2.0), ""),
        ((3.0, 3.0), "its step count went from 3 to 3"),
    ],
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


@pytest.mark.parametrize(
    ("rate", "options", "hint"),
    [
        (0.5, {}, "as if the learning rate were 0.5 in place of 0.25, or the gradient 2 times as large"),
        (0.5, {"lr": 0.0}, "as if the learning rate were 0.5 in place of 0"),
        (0.5, {"momentum": 0.5}, ""),
        (0.25 * (1 + 1e-5), {}, ""),
    ],
)
def test_the_hint_names_the_learning_rate_of_plain_sgd(rate: float, options: dict[str, float], hint: str) -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    wrong = compare_bitwise(place, -0.25 * grad, -rate * grad)
    hinted = hint_learning_rate(wrong, -rate * grad, grad, {"lr": 0.25, **options})
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == (f"the step is {hint}" if hint else "")
    unfitting = hint_learning_rate(wrong, torch.tensor([1.0, -2.0]), grad.float(), {"lr": 0.25})
    assert unfitting == wrong
    counted = add_hint(wrong, "its step count went from 1 to 7")
    assert hint_learning_rate(counted, -rate * grad, grad, {"lr": 0.25}) == counted


def test_the_hint_names_the_gradients_that_have_the_norm() -> None:
    place = TensorLocation(name="norm", part=Part.REDUCTION, step=0)
    wrong = compare_bitwise(place, torch.tensor(1.0), torch.tensor(5.0))
    others = {"other": {"weight": torch.tensor([1.0])}, "old": {"weight": torch.tensor([3.0, 4.0])}}
    hinted = hint_other_norm(wrong, others)
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == "old"
    assert hint_other_norm(wrong, {}) == wrong
