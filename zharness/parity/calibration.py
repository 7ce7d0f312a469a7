"""Judge gradients of an engine's own kernels by the distance of torch's gradients from float64: tier C.

The oracle is the plain model's gradient in float64, computed from the same rounded weights and inputs. The error of an
element is z = (g - oracle) / s. Here s is the root of the sum of squares of the gradients of single samples, but at
least a tenth of the root mean square of s over the tensor. Eight runs of plain PyTorch, with permuted samples and
different micro-batch sizes, determine the limits of z; the engine under test never contributes to these limits. Such
limits miss small errors, so only local gradients are judged by tier C, and the reduction is judged by tier S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from zharness.parity.baseline import Baseline, convert_to_float64, run_backward, run_local
from zharness.parity.compare import build_mismatch
from zharness.parity.comparison import Comparison, MismatchTensors, Part, TensorLocation, Tier
from zharness.workload import Batch

CALIBRATION_RUNS = 8
# An engine may reach the plain runs' maximum times these factors, which were measured to separate right kernels
# from wrong ones.
LARGEST_FACTOR, SPREAD_FACTOR, SCALE_FACTOR = 2.0, 1.5, 4.0
UNIT_FLOOR = 0.1  # smallest unit of an element, as a share of the root mean square of s

Grads = Mapping[str, Tensor]


@dataclass(frozen=True)
class ErrorStatistics:
    """The error of one run: the largest |z|, the root mean square of z, and the largest scale error of any tensor."""

    max_error: float
    rms_error: float
    scale_error: float


@dataclass(frozen=True)
class Calibration:
    """The float64 gradients of one rank's micro-batch, the unit ``s`` of each element's error, and the error limits."""

    oracle: Grads
    units: Grads
    limits: ErrorStatistics

    def normalized_errors(self, grads: Grads) -> dict[str, Tensor]:
        """Return, for each gradient in ``grads``, its difference from the float64 gradient in units of ``s``."""
        return {name: (grads[name].double() - truth) / self.units[name] for name, truth in self.oracle.items()}


@lru_cache(maxsize=64)
def calibrate(baseline: Baseline, rank: int, step: int = 0) -> Calibration:
    """Compute the calibration of one rank's micro-batch at the initial weights.

    The result does not depend on engine or stage, so each process computes it only once.
    """
    model, batch = baseline.build_module(), baseline.batch(rank, step)
    oracle = dict(run_local(*convert_to_float64(model, batch), baseline.objective).grads)
    samples = [
        run_local(*convert_to_float64(model, sample), baseline.objective).grads for sample in split_batch(batch, 1)
    ]
    units = {}
    for name in oracle:
        s = torch.stack([grads[name] / len(samples) for grads in samples]).square().sum(0).sqrt()
        floor = UNIT_FLOOR * s.square().mean().sqrt() if s.numel() else s.sum()
        units[name] = s.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))
    bare = Calibration(oracle, units, ErrorStatistics(0.0, 0.0, 0.0))
    runs = [error_statistics(bare, run_permuted_plain(baseline, batch, number)) for number in range(CALIBRATION_RUNS)]
    eps = torch.finfo(baseline.dtype).eps
    limits = ErrorStatistics(
        max_error=LARGEST_FACTOR * max(run.max_error for run in runs),
        rms_error=SPREAD_FACTOR * max(run.rms_error for run in runs),
        scale_error=SCALE_FACTOR * (max(run.scale_error for run in runs) + eps),
    )
    return replace(bare, limits=limits)


def run_permuted_plain(baseline: Baseline, batch: Batch, number: int) -> Grads:
    """Return the plain model's gradients of a batch whose samples are permuted and split into micro-batches.

    ``number`` is the seed of the permutation and determines the size of the micro-batches, over which the gradients are
    averaged.
    """
    samples = batch.num_samples
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(number))
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    shuffled = batch.map_tensors(lambda tensor: tensor[order])
    micros = split_batch(shuffled, sizes[number % len(sizes)])
    micro_grads = [plain_gradients(baseline, micro) for micro in micros]
    return {name: torch.stack([grads[name] for grads in micro_grads]).sum(0) / len(micros) for name in micro_grads[0]}


def plain_gradients(baseline: Baseline, batch: Batch) -> Grads:
    """Return the gradients of ``batch`` in a new plain model."""
    model = baseline.build_module()
    loss = baseline.objective(baseline.compute_output(model, batch), batch)
    return run_backward(model, loss, baseline.loss_scale).grads


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Split ``batch`` into batches of ``size`` samples."""
    starts = range(0, batch.num_samples, size)
    return [batch.map_tensors(lambda tensor: tensor[start : start + size]) for start in starts]  # noqa: B023 - called at once


def error_statistics(calibration: Calibration, grads: Grads) -> ErrorStatistics:
    """Return the error statistics of one run with the gradients ``grads``."""
    z = torch.cat([tensor.flatten() for tensor in calibration.normalized_errors(grads).values()])
    scales = [fit_scale_error(calibration, grads, name) for name in calibration.oracle]
    return ErrorStatistics(float(z.abs().max()), float(z.square().mean().sqrt()), max(scales))


def fit_scale_error(calibration: Calibration, grads: Grads, name: str) -> float:
    """Return |f - 1| for the factor f for which f times the oracle is closest to the gradient ``name``.

    The distance of each element is measured in units of ``s``.
    """
    weighed = calibration.oracle[name] / calibration.units[name]
    norm = float(weighed.square().sum())
    return abs(float((calibration.normalized_errors(grads)[name] * weighed).sum())) / norm if norm else 0.0


def compare_calibrated(location: TensorLocation, calibration: Calibration, grads: Grads) -> Comparison:
    """Compare one rank's local gradients with the oracle; a mismatch describes the worst element of the worst tensor.

    In the result, ``location.name`` is replaced by the name of the worst tensor. ``smallest_detectable`` is the
    smallest scale error of one tensor that is certain to be detected.
    """
    statistics, limits = error_statistics(calibration, grads), calibration.limits
    ratios = {
        "largest error": ratio_to_limit(statistics.max_error, limits.max_error),
        "spread of errors": ratio_to_limit(statistics.rms_error, limits.rms_error),
        "scale": ratio_to_limit(statistics.scale_error, limits.scale_error),
    }
    z = calibration.normalized_errors(grads)
    below_limit = {
        name: limits.max_error * unit >= calibration.oracle[name].abs() for name, unit in calibration.units.items()
    }
    comparison = Comparison(
        tier=Tier.CALIBRATED,
        ratio=max(ratios.values()),
        smallest_detectable=2 * limits.scale_error,
        elements=sum(tensor.numel() for tensor in z.values()),
        undetermined=sum(int((below_limit[name] & (calibration.oracle[name] != 0)).sum()) for name in below_limit),
        location=location,
    )
    if not comparison.ratio > 1:
        return comparison
    sizes = {name: tensor.abs().nan_to_num(nan=torch.inf) for name, tensor in z.items()}
    worst = max(sizes, key=lambda name: float(sizes[name].max()) if sizes[name].numel() else 0.0)
    bound = limits.max_error * calibration.units[worst]
    wrong, error = sizes[worst] == sizes[worst].max(), sizes[worst] * calibration.units[worst]
    named = replace(location, name=worst, part=Part.LOCAL_GRADIENT)
    # The engine computed in float32 and unscaled its gradients in float64, so ULPs are counted in float32.
    actual = grads[worst].float()
    element = build_mismatch(named, calibration.oracle[worst], actual, bound, error, wrong)
    statistic = max(ratios, key=lambda key: ratios[key])
    hint = f"the {statistic} is {ratios[statistic]:.3g} x what {CALIBRATION_RUNS} runs of torch's own kernels allow"
    group = {name: ratio_to_limit(float(size.max()), limits.max_error) for name, size in sizes.items() if size.numel()}
    tensors = MismatchTensors(
        calibration.oracle[worst], actual, sizes[worst] / limits.max_error, ratios_by_parameter=group
    )
    return replace(comparison, mismatch=replace(element, hint=hint), location=named, mismatch_tensors=tensors)


def ratio_to_limit(value: float, limit: float) -> float:
    """Return ``value / limit``; return infinity if ``value`` is NaN, or if ``limit`` is 0 and ``value`` is not."""
    if value != value:
        return torch.inf
    return value / limit if limit else (torch.inf if value else 0.0)
