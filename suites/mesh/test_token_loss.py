"""The tokens of mesh.token_loss and pipeline.token_loss differ, and their mean is exact, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zharness.laws import pipeline_token_loss
from zharness.laws.mesh_token_loss import MICRO_BATCHES, TokenLoss, build_loss, share_tokens
from zharness.parity.baseline import Baseline
from zharness.parity.certificate import is_power_of_two
from zharness.workload import model_spec

DATA_SIZES = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("places", [4, 8])
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("data_size", [*DATA_SIZES, 5, 7, 8, 12, 16, 64])
def test_tokens_are_a_power_of_two_and_differ(data_size: int, micro_batches: int, places: int) -> None:
    table = share_tokens(places, data_size, micro_batches)
    numbers = [number for row in table for number in row]
    assert [len(row) for row in table] == [micro_batches] * data_size
    assert is_power_of_two(sum(numbers))
    assert 0 <= min(numbers) < max(numbers) <= places
    assert len({sum(row) for row in table}) > 1 or data_size == 1, "all data coordinates have as many tokens"


@pytest.mark.parametrize(
    ("data_size", "micro_batches", "places"),
    [*((size, 2, 8) for size in DATA_SIZES), *((size, 4, 8) for size in DATA_SIZES), (2, 2, 4), (3, 2, 4), (4, 2, 4)],
)
def test_all_that_can_differ_differ(data_size: int, micro_batches: int, places: int) -> None:
    table = share_tokens(places, data_size, micro_batches)
    numbers = {number for row in table for number in row}
    assert len({sum(row) for row in table}) == data_size, "two data coordinates have as many tokens"
    assert all(len({*row}) == micro_batches for row in table), "two micro-batches of a coordinate have as many tokens"
    assert len(numbers) == data_size * micro_batches or data_size * micro_batches > places + 1


@pytest.mark.parametrize("data_size", DATA_SIZES)
@pytest.mark.parametrize("model", ["tokens", "parallel_tokens", "sequence_tokens", "context_tokens", "routed"])
def test_the_mean_over_all_tokens_is_exact(model: str, data_size: int) -> None:
    baseline = Baseline(model_spec(model), seed=5, data_size=data_size)
    check_orders(build_loss(data_size), baseline, scale=len(MICRO_BATCHES))


@pytest.mark.parametrize("data_size", DATA_SIZES)
def test_the_mean_of_a_pipeline_is_exact(data_size: int) -> None:
    baseline = Baseline(model_spec("token_chain"), seed=5, data_size=data_size)
    check_orders(pipeline_token_loss.build_loss(data_size), baseline)


def check_orders(loss: TokenLoss, baseline: Baseline, scale: float = 1.0) -> None:
    """Check that the mean of all gradients is certified, and that ways of computing it give the bits of float64."""
    assert loss.certify(baseline, torch.float32)
    results = [result for micro in range(loss.micro_batches) for result in loss.run_plain(baseline, micro)]
    for name in baseline.parameter_names:
        terms = torch.stack([result.grads[name] for result in results])
        right = scale * terms.double().mean(dim=0)
        assert right.any() or name.startswith("moe.experts"), f"no token has a gradient of {name}"
        means = {"sum first": terms.sum(dim=0) / len(terms), "product": (terms * (1 / len(terms))).sum(dim=0)}
        means |= {"divided first": (terms / len(terms)).sum(dim=0), "reversed": sum_reversed(terms) / len(terms)}
        assert not [way for way, mean in means.items() if not torch.equal((scale * mean).double(), right)]


def sum_reversed(terms: Tensor) -> Tensor:
    """Return the sum of the terms from the last to the first."""
    return terms.flip(0).cumsum(dim=0)[-1]


def test_a_mean_of_seven_is_within_a_bound_alone() -> None:
    found = build_loss(7).certify(Baseline(model_spec("tokens"), seed=5, data_size=7), torch.float32)
    assert found.reason == "a mean of 14 terms is not exact: a product with 1 / 14 rounds multiples of it"


def test_a_sum_that_needs_too_many_bits_is_not_certified() -> None:
    baseline = Baseline(model_spec("tokens"), seed=5, data_size=3)
    assert "the 8 bits of bfloat16" in build_loss(3).certify(baseline, torch.bfloat16).reason
    assert not build_loss(3).certify(Baseline(model_spec("mlp"), seed=5, data_size=3), torch.float32)
