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

from zharness.parity.baseline import Baseline, differentiated, in_float64, run_local
from zharness.parity.compare import mismatch
from zharness.parity.facts import Comparison, Part, Place, Tier, Witness
from zharness.workload import Batch

RUNS = 8
# How far beyond the vanilla runs' maximum an engine may be: as measured, these part right kernels from wrong ones.
LARGEST, SPREAD, SCALE = 2.0, 1.5, 4.0
FLOOR = 0.1  # of the root mean square of s, below which an element's own scale says nothing

Grads = Mapping[str, Tensor]


@dataclass(frozen=True)
class Statistics:
    """Of one run: the largest |z|, the root mean square of z, and the largest scale error fitted to a tensor."""

    largest: float
    spread: float
    scale: float


@dataclass(frozen=True)
class Calibration:
    """The float64 gradients of one rank's micro-batch, the unit ``s`` of each element, and the limits."""

    oracle: Grads
    units: Grads
    limits: Statistics

    def z(self, grads: Grads) -> dict[str, Tensor]:
        """Errors in units of ``s``."""
        return {name: (grads[name].double() - truth) / self.units[name] for name, truth in self.oracle.items()}


@lru_cache(maxsize=64)
def calibration(baseline: Baseline, rank: int, step: int = 0) -> Calibration:
    """For the initial weights. The same for every engine and stage, so a process computes it once."""
    model, batch = baseline.module(), baseline.batch(rank, step)
    oracle = dict(run_local(*in_float64(model, batch), baseline.objective).grads)
    alone = [run_local(*in_float64(model, sample), baseline.objective).grads for sample in parts_of(batch, 1)]
    units = {}
    for name in oracle:
        s = torch.stack([grads[name] / len(alone) for grads in alone]).square().sum(0).sqrt()
        floor = FLOOR * s.square().mean().sqrt() if s.numel() else s.sum()
        units[name] = s.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))
    bare = Calibration(oracle, units, Statistics(0.0, 0.0, 0.0))
    runs = [statistics(bare, vanilla_run(baseline, batch, number)) for number in range(RUNS)]
    eps = torch.finfo(baseline.dtype).eps
    limits = Statistics(
        largest=LARGEST * max(run.largest for run in runs),
        spread=SPREAD * max(run.spread for run in runs),
        scale=SCALE * (max(run.scale for run in runs) + eps),
    )
    return replace(bare, limits=limits)


def vanilla_run(baseline: Baseline, batch: Batch, number: int) -> Grads:
    """The plain model's gradients with the samples in another order, in micro-batches of 1, 2, ... or all of them."""
    samples = batch.samples
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(number))
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    shuffled = batch.mapped(lambda tensor: tensor[order])
    micros = parts_of(shuffled, sizes[number % len(sizes)])
    found = [vanilla(baseline, micro) for micro in micros]
    return {name: torch.stack([grads[name] for grads in found]).sum(0) / len(found) for name in found[0]}


def vanilla(baseline: Baseline, batch: Batch) -> Grads:
    """The plain model's own gradients of a batch."""
    model = baseline.module()
    loss = baseline.objective(baseline.output(model, batch), batch)
    return differentiated(model, loss, baseline.loss_scale).grads


def parts_of(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of ``size`` samples."""
    starts = range(0, batch.samples, size)
    return [batch.mapped(lambda tensor: tensor[start : start + size]) for start in starts]  # noqa: B023 - called at once


def statistics(calibrated: Calibration, grads: Grads) -> Statistics:
    """Those of one run's gradients."""
    z = torch.cat([tensor.flatten() for tensor in calibrated.z(grads).values()])
    scales = [scale_error(calibrated, grads, name) for name in calibrated.oracle]
    return Statistics(float(z.abs().max()), float(z.square().mean().sqrt()), max(scales))


def scale_error(calibrated: Calibration, grads: Grads, name: str) -> float:
    """|f - 1| for the factor f that fits a tensor best, every element weighed by its unit."""
    weighed = calibrated.oracle[name] / calibrated.units[name]
    norm = float(weighed.square().sum())
    return abs(float((calibrated.z(grads)[name] * weighed).sum())) / norm if norm else 0.0


def calibrated_comparison(place: Place, calibrated: Calibration, grads: Grads) -> Comparison:
    """All local gradients of one rank against their oracle. The mismatch is the worst element of the worst tensor.

    ``place.name`` is not looked at. ``smallest`` is the scale error of one tensor that is certain to be caught.
    """
    found, limits = statistics(calibrated, grads), calibrated.limits
    ratios = {
        "largest error": over(found.largest, limits.largest),
        "spread of errors": over(found.spread, limits.spread),
        "scale": over(found.scale, limits.scale),
    }
    z = calibrated.z(grads)
    lost = {name: limits.largest * unit >= calibrated.oracle[name].abs() for name, unit in calibrated.units.items()}
    comparison = Comparison(
        tier=Tier.CALIBRATED,
        ratio=max(ratios.values()),
        smallest=2 * limits.scale,
        elements=sum(tensor.numel() for tensor in z.values()),
        undetermined=sum(int((lost[name] & (calibrated.oracle[name] != 0)).sum()) for name in lost),
        place=place,
    )
    if not comparison.ratio > 1:
        return comparison
    sizes = {name: tensor.abs().nan_to_num(nan=torch.inf) for name, tensor in z.items()}
    worst = max(sizes, key=lambda name: float(sizes[name].max()) if sizes[name].numel() else 0.0)
    bound = limits.largest * calibrated.units[worst]
    wrong, error = sizes[worst] == sizes[worst].max(), sizes[worst] * calibrated.units[worst]
    named = replace(place, name=worst, part=Part.LOCAL_GRADIENT)
    # An engine's gradients come scaled in float64; their last place is that of the float32 in which they were computed.
    held = grads[worst].float()
    element = mismatch(named, calibrated.oracle[worst], held, bound, error, wrong)
    what = max(ratios, key=lambda key: ratios[key])
    hint = f"the {what} is {ratios[what]:.3g} x what {RUNS} runs of torch's own kernels allow"
    group = {name: over(float(size.max()), limits.largest) for name, size in sizes.items() if size.numel()}
    witness = Witness(calibrated.oracle[worst], held, sizes[worst] / limits.largest, group=group)
    return replace(comparison, mismatch=replace(element, hint=hint), place=named, witness=witness)


def over(found: float, limit: float) -> float:
    """``found`` over its limit; NaN is over every limit."""
    if found != found:
        return torch.inf
    return found / limit if limit else (torch.inf if found else 0.0)
