"""Tier C passes torch's own kernels in any order of samples, and fails the smallest error that it claims to catch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zharness.parity import Comparison, Part, Tier, calibration, sample_runs
from zharness.parity.baseline import Baseline, run_local
from zharness.parity.calibration import Calibration, MeanTerm, calibrate, calibrate_sum, compare_calibrated
from zharness.parity.comparison import TensorLocation
from zharness.parity.sample_runs import CALIBRATION_RUNS, SampleRuns, run_permuted_plain
from zharness.workload import model_spec

NAMES = ("mlp", "transformer", "conv")
PLACE = TensorLocation("", Part.LOCAL_GRADIENT)


def build_baseline(name: str, seed: int = 0) -> Baseline:
    return Baseline(model_spec(name), seed=seed, data_size=1)


def judged(baseline: Baseline, grads: dict[str, Tensor]) -> Comparison:
    return compare_calibrated(PLACE, calibrate(baseline, 0), grads)


def right(baseline: Baseline) -> dict[str, Tensor]:
    return dict(baseline.run_rank(0, 0).grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_torch_s_own_kernels_pass_in_orders_that_were_not_calibrated_on(name: str, seed: int) -> None:
    baseline = build_baseline(name, seed)
    for number in range(CALIBRATION_RUNS, CALIBRATION_RUNS + 4):
        found = judged(baseline, dict(run_permuted_plain(SampleRuns.record(baseline, 0, 0), number)))
        assert found.mismatch is None
        assert found.tier is Tier.CALIBRATED
        assert found.ratio < 1


class Apart(nn.Linear):
    """A linear layer that adds the bias separately and sums the product in two halves."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., :half] @ self.weight[:, :half].t() + x[..., half:] @ self.weight[:, half:].t() + self.bias


def test_another_right_kernel_passes() -> None:
    baseline = build_baseline("mlp", 3)
    model = baseline.build_module()
    model.first.__class__ = Apart
    grads = run_local(model, baseline.batch(0, 0), baseline.objective).grads
    assert not all(torch.equal(grads[name], grad) for name, grad in right(baseline).items()), "it is another kernel"
    assert judged(baseline, dict(grads)).mismatch is None


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_error_that_is_said_to_be_caught_is_caught_in_every_tensor(name: str) -> None:
    baseline = build_baseline(name)
    smallest = judged(baseline, right(baseline)).smallest_detectable
    for tensor, grad in right(baseline).items():
        wrong = {**right(baseline), tensor: grad.double() * (1 + smallest)}
        found = judged(baseline, wrong).mismatch
        assert found is not None, tensor
        assert found.part is Part.LOCAL_GRADIENT
        assert "what 8 runs of torch's own kernels allow" in found.hint


WRONG = {
    "computed in bf16": lambda grad: grad.bfloat16().float(),
    "one element lost": lambda grad: torch.where(grad.abs() == grad.abs().max(), 0.0, grad),
    "not a number": lambda grad: torch.full_like(grad, torch.nan),
    "half of it": lambda grad: grad / 2,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_fails_and_its_tensor_is_named(wrong) -> None:
    baseline = build_baseline("transformer", 1)
    grads = right(baseline)
    found = judged(baseline, {**grads, "blocks.0.up.weight": wrong(grads["blocks.0.up.weight"])}).mismatch
    assert found is not None
    assert found.parameter == "blocks.0.up.weight"


def test_a_calibration_is_made_once_for_all_engines() -> None:
    assert calibrate(build_baseline("mlp"), 0) is calibrate(build_baseline("mlp"), 0)


def test_one_noisy_element_does_not_excuse_its_tensor_from_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_with_noise(runs: SampleRuns, number: int, splits: bool = True) -> dict[str, Tensor]:
        """Add two percent of the largest element to one element, in one of the eight runs."""
        grads = dict(run_permuted_plain(runs, number, splits))
        if number == 0:
            weight = grads["first.weight"].clone()
            weight.view(-1)[weight.abs().argmin()] += 0.02 * weight.abs().max()
            grads["first.weight"] = weight
        return grads

    baseline = build_baseline("mlp")
    monkeypatch.setattr(sample_runs, "run_permuted_plain", run_with_noise)
    noisy = calibrate.__wrapped__(baseline, 0)
    assert not noisy.zero_names
    smallest = compare_calibrated(PLACE, noisy, right(baseline)).smallest_detectable
    for tensor, grad in right(baseline).items():
        wrong = {**right(baseline), tensor: grad.double() * (1 + smallest)}
        assert compare_calibrated(PLACE, noisy, wrong).mismatch is not None, tensor


def test_a_zero_tensor_has_no_scale_whose_error_could_be_detected() -> None:
    zero = {"bias": torch.zeros(3, dtype=torch.float64)}
    noise = {"bias": torch.full((3,), 1e-9)}
    assert calibration.find_zero_names(zero, [zero, noise]) == {"bias"}
    assert not calibration.find_zero_names(zero, [zero]), "every run is right"
    units = {"bias": torch.ones(3, dtype=torch.float64)}
    limits = calibration.ErrorStatistics(1.0, 1.0, 1e-6)
    found = compare_calibrated(PLACE, Calibration(zero, units, limits, frozenset(zero)), noise)
    assert found.smallest_detectable == torch.inf


@pytest.mark.parametrize("message", ["Expected more than 1 value per channel when training", "4 lengths, 1 sample"])
def test_a_model_that_refuses_a_single_sample_is_run_on_all_of_them(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = build_baseline("mlp")
    runs = SampleRuns.record(baseline, 0, 0)
    oracle = runs.compute_grads(torch.arange(runs.batch.num_samples), wide=True)

    def refuse(*args: object, **options: object) -> None:
        raise ValueError(message)

    monkeypatch.setattr(SampleRuns, "compute_grads", refuse)
    assert sample_runs.sum_squares_of_samples(runs, oracle) is None


def test_a_sum_of_several_micro_batches_is_judged_with_their_factors_and_without_frozen_weights() -> None:
    baseline = build_baseline("mlp")
    terms = [MeanTerm(0, step, factor) for step, factor in ((0, 1.0), (1, 2.0), (2, 0.5))]
    calibrated = calibrate_sum(None, baseline, terms, scale=3.0, left_out={"last.bias"})
    local = [(term.factor, baseline.run_rank(term.rank, term.step).grads) for term in terms]
    found = {name: sum(factor * grads[name] for factor, grads in local) for name in calibrated.oracle}
    assert local[0][1].keys() - found.keys() == {"last.bias"}
    assert compare_calibrated(PLACE, calibrated, found).mismatch is None
    unscaled = {name: sum(grads[name] for _, grads in local) for name in calibrated.oracle}
    assert compare_calibrated(PLACE, calibrated, unscaled).mismatch is not None
