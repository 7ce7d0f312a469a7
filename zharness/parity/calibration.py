"""Tier C: gradients of kernels that are not torch's, judged by how far torch's own runs are from float64.

The oracle is the plain model in float64, from the same rounded weights and inputs. An error is measured in units of
what the samples of the batch contribute, z = (g - oracle) / s with s the root of the sum of the squares of the samples'
gradients, floored at a tenth of its root mean square. Eight vanilla runs, samples permuted and micro-batched, say how
large z is where everything is right; the engine under test never does. A tier of this kind misses small errors, so it
judges local gradients alone: the reduction is held to tier S.
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
# How far beyond the vanilla runs' maximum an engine may be: as measured, these part right kernels from wrong ones.
LARGEST_FACTOR, SPREAD_FACTOR, SCALE_FACTOR = 2.0, 1.5, 4.0
UNIT_FLOOR = 0.1  # of the root mean square of s, below which an element's own scale says nothing

Grads = Mapping[str, Tensor]


@dataclass(frozen=True)
class ErrorStatistics:
    """Of one run: the largest |z|, the root mean square of z, and the largest scale error fitted to a tensor."""

    max_error: float
    rms_error: float
    scale_error: float


@dataclass(frozen=True)
class Calibration:
    """The float64 gradients of one rank's micro-batch, the unit ``s`` of each element, and the limits."""

    oracle: Grads
    units: Grads
    limits: ErrorStatistics

    def normalized_errors(self, grads: Grads) -> dict[str, Tensor]:
        """Errors in units of ``s``."""
        return {name: (grads[name].double() - truth) / self.units[name] for name, truth in self.oracle.items()}


@lru_cache(maxsize=64)
def calibrate(baseline: Baseline, rank: int, step: int = 0) -> Calibration:
    """For the initial weights. The same for every engine and stage, so a process computes it once."""
    model, batch = baseline.build_module(), baseline.batch(rank, step)
    oracle = dict(run_local(*convert_to_float64(model, batch), baseline.objective).grads)
    alone = [
        run_local(*convert_to_float64(model, sample), baseline.objective).grads for sample in split_batch(batch, 1)
    ]
    units = {}
    for name in oracle:
        s = torch.stack([grads[name] / len(alone) for grads in alone]).square().sum(0).sqrt()
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
    """The plain model's gradients with the samples in another order, in micro-batches of 1, 2, ... or all of them."""
    samples = batch.num_samples
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(number))
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    shuffled = batch.map_tensors(lambda tensor: tensor[order])
    micros = split_batch(shuffled, sizes[number % len(sizes)])
    found = [plain_gradients(baseline, micro) for micro in micros]
    return {name: torch.stack([grads[name] for grads in found]).sum(0) / len(found) for name in found[0]}


def plain_gradients(baseline: Baseline, batch: Batch) -> Grads:
    """The plain model's own gradients of a batch."""
    model = baseline.build_module()
    loss = baseline.objective(baseline.compute_output(model, batch), batch)
    return run_backward(model, loss, baseline.loss_scale).grads


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of ``size`` samples."""
    starts = range(0, batch.num_samples, size)
    return [batch.map_tensors(lambda tensor: tensor[start : start + size]) for start in starts]  # noqa: B023 - called at once


def error_statistics(calibration: Calibration, grads: Grads) -> ErrorStatistics:
    """Those of one run's gradients."""
    z = torch.cat([tensor.flatten() for tensor in calibration.normalized_errors(grads).values()])
    scales = [fit_scale_error(calibration, grads, name) for name in calibration.oracle]
    return ErrorStatistics(float(z.abs().max()), float(z.square().mean().sqrt()), max(scales))


def fit_scale_error(calibration: Calibration, grads: Grads, name: str) -> float:
    """|f - 1| for the factor f that fits a tensor best, every element weighed by its unit."""
    weighed = calibration.oracle[name] / calibration.units[name]
    norm = float(weighed.square().sum())
    return abs(float((calibration.normalized_errors(grads)[name] * weighed).sum())) / norm if norm else 0.0


def compare_calibrated(location: TensorLocation, calibration: Calibration, grads: Grads) -> Comparison:
    """All local gradients of one rank against their oracle. The mismatch is the worst element of the worst tensor.

    ``place.name`` is not looked at. ``smallest`` is the scale error of one tensor that is certain to be caught.
    """
    found, limits = error_statistics(calibration, grads), calibration.limits
    ratios = {
        "largest error": ratio_to_limit(found.max_error, limits.max_error),
        "spread of errors": ratio_to_limit(found.rms_error, limits.rms_error),
        "scale": ratio_to_limit(found.scale_error, limits.scale_error),
    }
    z = calibration.normalized_errors(grads)
    lost = {name: limits.max_error * unit >= calibration.oracle[name].abs() for name, unit in calibration.units.items()}
    comparison = Comparison(
        tier=Tier.CALIBRATED,
        ratio=max(ratios.values()),
        smallest_detectable=2 * limits.scale_error,
        elements=sum(tensor.numel() for tensor in z.values()),
        undetermined=sum(int((lost[name] & (calibration.oracle[name] != 0)).sum()) for name in lost),
        location=location,
    )
    if not comparison.ratio > 1:
        return comparison
    sizes = {name: tensor.abs().nan_to_num(nan=torch.inf) for name, tensor in z.items()}
    worst = max(sizes, key=lambda name: float(sizes[name].max()) if sizes[name].numel() else 0.0)
    bound = limits.max_error * calibration.units[worst]
    wrong, error = sizes[worst] == sizes[worst].max(), sizes[worst] * calibration.units[worst]
    named = replace(location, name=worst, part=Part.LOCAL_GRADIENT)
    # An engine's gradients come scaled in float64; their last place is that of the float32 in which they were computed.
    held = grads[worst].float()
    element = build_mismatch(named, calibration.oracle[worst], held, bound, error, wrong)
    what = max(ratios, key=lambda key: ratios[key])
    hint = f"the {what} is {ratios[what]:.3g} x what {CALIBRATION_RUNS} runs of torch's own kernels allow"
    group = {name: ratio_to_limit(float(size.max()), limits.max_error) for name, size in sizes.items() if size.numel()}
    witness = MismatchTensors(
        calibration.oracle[worst], held, sizes[worst] / limits.max_error, ratios_by_parameter=group
    )
    return replace(comparison, mismatch=replace(element, hint=hint), location=named, mismatch_tensors=witness)


def ratio_to_limit(value: float, limit: float) -> float:
    """``found`` over its limit; NaN is over every limit."""
    if value != value:
        return torch.inf
    return value / limit if limit else (torch.inf if value else 0.0)
