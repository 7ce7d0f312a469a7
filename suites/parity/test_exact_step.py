"""Steps of SGD that round nothing: which they are, and that torch's own step agrees bitwise with float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zharness.parity.exact_step import find_grid, is_exact_step

ONES, HALVES = torch.ones(3), torch.full((3,), 0.5)
NUMBERS = st.lists(st.integers(-(2**10), 2**10), min_size=3, max_size=3)
POWERS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
DAMPENINGS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])  # torch refuses none


def step(dtype: torch.dtype, foreach: bool, weight: Tensor, grad: Tensor, buffer: Tensor, options: Any) -> Tensor:
    """Return the weight after a step of torch.optim.SGD."""
    leaf = weight.to(dtype, copy=True)
    leaf.grad = grad.to(dtype, copy=True)  # to which foreach adds Nesterov's term in place
    optimizer = torch.optim.SGD([leaf], foreach=foreach, **options)
    if options["momentum"]:
        optimizer.state[leaf] = {"momentum_buffer": buffer.to(dtype, copy=True)}
    optimizer.step()
    return leaf


@pytest.mark.parametrize(
    ("tensors", "exponent"),
    [([ONES], 0), ([HALVES, 4 * ONES], -1), ([12 * ONES], 0), ([torch.zeros(2), torch.zeros(0)], 0)],
)
def test_the_grid_is_the_largest_power_of_two_up_to_1_that_divides_all(tensors: list[Tensor], exponent: int) -> None:
    assert find_grid(tensors) == exponent


def test_numbers_that_are_not_finite_have_no_grid() -> None:
    assert math.isnan(find_grid([torch.tensor([1.0, math.inf])]))
    assert not is_exact_step("sgd", ONES, torch.tensor([1.0, math.nan, 0.0]), None, {"lr": 1.0})


@pytest.mark.parametrize(
    ("optimizer", "weight", "options"),
    [
        ("adamw", ONES, {"lr": 1.0}),
        ("sgd", ONES, {"lr": 0.1}),
        ("sgd", torch.tensor([0.1, 1.0, 100.0]), {"lr": 1.0}),
        ("sgd", ONES * 2**23, {"lr": 0.5}),
        ("sgd", ONES.bfloat16() * 2**7, {"lr": 0.5}),
        ("sgd", ONES * (2**23 - 1), {"lr": 0.25, "momentum": 1.0, "weight_decay": 0.5, "dampening": 2.0}),
    ],
)
def test_a_step_that_rounds_is_not_exact(optimizer: str, weight: Tensor, options: dict[str, float]) -> None:
    assert not is_exact_step(optimizer, weight, ONES, None, options)


@settings(deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.tuples(POWERS, POWERS, POWERS, DAMPENINGS), st.booleans())
def test_torch_gives_the_bits_of_float64_where_a_step_is_exact(
    weights: list[int], grads: list[int], buffers: list[int], factors: tuple[float, ...], nesterov: bool
) -> None:
    options: dict[str, Any] = dict(zip(("lr", "momentum", "weight_decay", "dampening"), factors, strict=True))
    options["nesterov"] = nesterov and options["momentum"] > 0 and options["dampening"] == 0
    weight, grad, buffer = (torch.tensor(numbers, dtype=torch.float32) for numbers in (weights, grads, buffers))
    if is_exact_step("sgd", weight, grad, buffer if options["momentum"] else None, options):
        wide = step(torch.float64, False, weight, grad, buffer, options)
        for foreach in (False, True):
            assert torch.equal(step(torch.float32, foreach, weight, grad, buffer, options).double(), wide)


def test_small_integers_with_powers_of_two_are_exact() -> None:
    assert is_exact_step("sgd", 3 * ONES, 5 * ONES, 7 * HALVES, {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.25})
