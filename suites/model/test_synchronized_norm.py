"""A model with SyncBatchNorm is held to plain batch norm over the rows of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness.parity.baseline import Baseline
from zharness.parity.sample_runs import INDEPENDENCE_TOLERANCE
from zharness.run import Record, Verdict
from zharness.run.pytest_cells import describe_problem
from zharness.workload import model_spec
from zharness.workload.synchronized_norm import (
    SynchronizedBatchNorm,
    has_synchronized_norm,
    replace_synchronized_norms,
    run_jointly,
)

MODEL = "suites.model.zoo:sync_norm"
LAWS = (
    *("training.grads", "training.one_hot_rank", "training.accumulation", "training.ranks_agree", "state.consolidate"),
    *("training.forward_alone", "model.configured"),
)
ROWS = (slice(0, 5), slice(5, 6), slice(6, 10))  # of three ranks; batch norm alone would refuse a single row


@pytest.mark.cells("reference", stages=(3,), checks=LAWS, models=(MODEL,))
@pytest.mark.cells("ddp", checks=("training.grads", "training.ranks_agree"), models=(MODEL,))
@pytest.mark.cells("zero1", checks=("training.grads",), models=(MODEL,))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("training.grads", "state.resume"), models=(MODEL,))
@pytest.mark.cells("deepspeed", stages=(2,), checks=("training.grads", "training.accumulation"), models=(MODEL,))
@pytest.mark.cells("deepspeed", stages=(3,), checks=("training.kernels", "training.ranks_agree"), models=(MODEL,))
def test_the_laws_hold(record: Record) -> None:
    assert not describe_problem(record), describe_problem(record)


@pytest.mark.cells("suites.model.local_norms:reference", stages=(0,), checks=("training.grads",), models=(MODEL,))
@pytest.mark.cells("suites.model.local_norms:deepspeed", stages=(3,), checks=("training.kernels",), models=(MODEL,))
def test_an_engine_whose_norms_see_one_rank_fails(record: Record) -> None:
    assert record.verdict is Verdict.FAIL, record.cause


def assert_equal_but_for_rounding(found: Tensor, expected: Tensor) -> None:
    """Check that two float64 tensors are equal within a tolerance far above float64's rounding."""
    error = (found - expected).detach().abs().max()
    assert float(error) <= INDEPENDENCE_TOLERANCE * max(1.0, float(expected.detach().abs().max())), (found, expected)


def conv_net(**settings: Any) -> nn.Module:
    """Return a float64 convolutional network with batch norm."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, **settings)
    return nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()


def perceptron() -> nn.Module:
    """Return a float64 perceptron with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize(
    "build",
    [
        conv_net,
        perceptron,
        partial(conv_net, momentum=None),
        partial(conv_net, affine=False, track_running_stats=False),
    ],
    ids=["conv", "rows", "cumulative", "bare"],
)
def test_ranks_together_compute_batch_norm_over_all_rows(build: Callable[[], nn.Module]) -> None:
    plain, inputs = build(), torch.randn(10, 2, 6, 6, dtype=torch.float64)
    models = [replace_synchronized_norms(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))) for _ in ROWS]

    def run(rank: int) -> Tensor:
        for _ in range(2):
            loss = models[rank](inputs[ROWS[rank]]).square().sum()
        loss.backward()
        return loss.detach()

    losses = run_jointly([partial(run, rank) for rank in range(len(ROWS))])
    for _ in range(2):
        loss = plain(inputs).square().sum()
    loss.backward()
    assert_equal_but_for_rounding(torch.stack(losses).sum(), loss.detach())
    for name, parameter in plain.named_parameters():
        grads = [grad for model in models if (grad := model.get_parameter(name).grad) is not None]
        assert parameter.grad is not None
        assert_equal_but_for_rounding(torch.stack(grads).sum(0), parameter.grad)
    for name, buffer in plain.named_buffers():
        for model in models:
            assert_equal_but_for_rounding(model.get_buffer(name), buffer)
    for model in models:
        assert_equal_but_for_rounding(model.eval()(inputs), plain.eval()(inputs))


def test_torch_has_no_synchronized_norm_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="batch_norm_stats"):
        torch.batch_norm_stats(torch.ones(4, 3), 1e-5)


def test_every_use_of_a_norm_is_replaced_and_keeps_its_tensors_and_hooks() -> None:
    norm = nn.SyncBatchNorm(6, momentum=0.3, eps=0.5).eval()
    seen: list[nn.Module] = []
    handle = norm.register_forward_hook(lambda module, _inputs, _output: seen.append(module))
    model = nn.ModuleDict({"first": norm, "again": norm})
    expected = dict(model.state_dict(keep_vars=True))
    assert replace_synchronized_norms(model) is model
    assert model["first"] is model["again"]
    replaced = model["first"]
    assert isinstance(replaced, SynchronizedBatchNorm)
    assert (replaced.momentum, replaced.eps, replaced.training, replaced.num_features) == (0.3, 0.5, False, 6)
    found = model.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    assert all(found[name] is tensor for name, tensor in expected.items())
    replaced(torch.ones(2, 6))
    handle.remove()
    replaced(torch.ones(2, 6))
    assert seen == [replaced], "hooks of the norm run, and can be removed"
    assert has_synchronized_norm(replace_synchronized_norms(nn.SyncBatchNorm(6)))
    assert not has_synchronized_norm(replace_synchronized_norms(nn.BatchNorm1d(6)))


def test_dropout_draws_the_same_numbers_beside_other_ranks() -> None:
    norm, dropout = SynchronizedBatchNorm(6).double(), nn.Dropout()
    inputs = torch.ones(4, 6, dtype=torch.float64)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        first = dropout(inputs)
        norm(first)
        return first, dropout(inputs)

    for seed, masks in zip((1, 2), run_jointly([partial(run, 1), partial(run, 2)]), strict=True):
        torch.manual_seed(seed)
        assert all(torch.equal(mask, dropout(inputs)) for mask in masks)


def test_a_rank_that_normalizes_more_often_than_another_is_an_error() -> None:
    norm, rows = SynchronizedBatchNorm(3), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="one rank calls a SyncBatchNorm more often than another"):
        run_jointly([lambda: norm(norm(rows)), lambda: norm(rows)])


def test_the_first_exception_of_a_rank_is_raised() -> None:
    norm, rows = SynchronizedBatchNorm(3), torch.randn(4, 3)

    def fail() -> Tensor:
        raise LookupError("no rows")

    with pytest.raises(LookupError, match="no rows"):
        run_jointly([lambda: norm(rows), fail])


def test_a_forward_without_gradients_meets_the_rows_of_all_ranks_too() -> None:
    baseline = Baseline(model_spec(MODEL), 0, 2)
    with torch.no_grad():
        losses = [baseline.run_forward(rank, 0).loss for rank in range(2)]
    assert losses == [result.loss for result in baseline.run_all_ranks()]
    assert losses != [Baseline(model_spec(MODEL), 0, 1).run_rank(rank, 0).loss for rank in range(2)]


def test_the_threads_of_ranks_create_tensors_on_the_callers_device() -> None:
    with torch.device("meta"):
        found = run_jointly([lambda: torch.zeros(1).device.type] * 2)
    assert found == ["meta", "meta"]
    assert run_jointly([lambda: torch.zeros(1).device.type]) == ["cpu"]
