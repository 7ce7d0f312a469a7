"""Judge gradients of an engine's own kernels by the distance of torch's gradients from float64: tier C.

The oracle is the plain model's gradient in float64, computed from the same rounded weights and inputs. The error of an
element is z = (g - oracle) / s. Here s is the root of the sum of squares of the gradients of single samples, but at
least a tenth of the root mean square of s over the tensor. Eight runs of plain PyTorch, with permuted samples and
different micro-batch sizes, determine the limits of z; the engine under test never contributes to these limits. Such
limits miss small errors. So tier C judges only the local gradients, and tier S judges their reduction. On a mesh whose
ranks have parts of a local gradient, tier C judges the mean of one backward as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from zharness.parity.baseline import Baseline
from zharness.parity.compare import build_mismatch
from zharness.parity.comparison import Comparison, MismatchTensors, TensorLocation, Tier
from zharness.parity.sample_runs import CALIBRATION_RUNS, Grads, record_runs

# An engine may reach the plain runs' maximum times these factors, which were measured to separate right kernels
# from wrong ones.
LARGEST_FACTOR, SPREAD_FACTOR, SCALE_FACTOR = 2.0, 1.5, 4.0
UNIT_FLOOR = 0.1  # smallest unit of an element, as a share of the root mean square of s


@dataclass(frozen=True)
class ErrorStatistics:
    """The error of one run: the largest |z|, the root mean square of z, and the largest scale error of any tensor."""

    max_error: float
    rms_error: float
    scale_error: float


@dataclass(frozen=True)
class Calibration:
    """The float64 gradients of one rank's micro-batch, the unit ``s`` of each element's error, and the error limits.

    ``zero_names`` are the gradients that would be zero without rounding, such as that of a bias before a batch norm.
    Only the size of their elements is judged.
    """

    oracle: Grads
    units: Grads
    limits: ErrorStatistics
    zero_names: frozenset[str] = frozenset()

    def normalized_errors(self, grads: Grads) -> dict[str, Tensor]:
        """Return, for each gradient in ``grads``, its difference from the float64 gradient in units of ``s``."""
        return {name: (grads[name].double() - truth) / self.units[name] for name, truth in self.oracle.items()}


@lru_cache(maxsize=64)
def calibrate(baseline: Baseline, rank: int, step: int = 0, loss_weights: tuple[float, ...] = ()) -> Calibration:
    """Compute the calibration of one rank's micro-batch at the initial weights.

    The result does not depend on engine or stage, so each process computes it only once. If the loss is not a mean over
    independent samples, as with batch norm, the plain runs only permute the samples, and the unit of an element is its
    gradient. If a SyncBatchNorm joins the ranks, the gradient is the gradient of the sum of all ranks' losses, each
    times its entry of ``loss_weights``. Raises SharedDrawError if the random numbers of the forward cannot be assigned
    to samples.
    """
    part = record_runs(baseline, rank, step, loss_weights)
    return build_calibration(part.oracle, part.squares, part.plain_grads, baseline.eps)


@dataclass(frozen=True)
class MeanTerm:
    """A micro-batch of a rank whose gradient, times ``factor``, is a term of a mean; the factor is a power of two."""

    rank: int
    step: int
    factor: float = 1.0


def calibrate_mean_at(params: Grads | None, baseline: Baseline, ranks: int, step: int = 0) -> Calibration:
    """Compute the calibration of the mean gradient of all ranks' micro-batches at ``params`` (None: initial weights).

    Raises SharedDrawError as ``calibrate`` does.
    """
    return calibrate_sum(params, baseline, [MeanTerm(rank, step) for rank in range(ranks)])


def calibrate_sum(
    params: Grads | None,
    baseline: Baseline,
    terms: Sequence[MeanTerm],
    scale: float = 1.0,
    left_out: Collection[str] = (),
) -> Calibration:
    """Compute the calibration of ``scale`` times the mean of ``terms`` at ``params``, without the names ``left_out``.

    Each plain run is the mean of the plain runs of all terms, in the dtype of the model. Raises SharedDrawError as
    ``calibrate`` does.
    """
    parts = [record_runs(baseline, term.rank, term.step, params=params) for term in terms]
    factors = [scale * term.factor for term in terms]
    names = [name for name in parts[0].oracle if name not in left_out]

    def compute_means(grads: Sequence[Grads]) -> Grads:
        """Return the mean of the gradients of all terms times their factors."""
        weighed = {name: [factor * each[name] for factor, each in zip(factors, grads, strict=True)] for name in names}
        return {name: torch.stack(each).mean(dim=0) for name, each in weighed.items()}

    term_squares = [part.squares for part in parts if part.squares is not None]
    squares = None
    if len(term_squares) == len(terms):
        weighed = zip(factors, term_squares, strict=True)
        rows = [{name: factor**2 * each[name] for name in names} for factor, each in weighed]
        squares = {name: torch.stack([row[name] for row in rows]).sum(dim=0) / len(terms) ** 2 for name in names}
    plain_grads = [compute_means(runs) for runs in zip(*(part.plain_grads for part in parts), strict=False)]
    return build_calibration(compute_means([part.oracle for part in parts]), squares, plain_grads, baseline.eps)


calibrate_mean = lru_cache(maxsize=8)(partial(calibrate_mean_at, None))


def build_calibration(oracle: Grads, squares: Grads | None, plain_grads: Sequence[Grads], eps: float) -> Calibration:
    """Return the calibration with the units that follow from ``squares`` and the limits from ``plain_grads``."""
    units = {}
    for name, whole in oracle.items():
        s = (whole.square() if squares is None else squares[name]).sqrt()
        floor = UNIT_FLOOR * s.square().mean().sqrt() if s.numel() else s.sum()
        units[name] = s.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))
    bare = Calibration(oracle, units, ErrorStatistics(0.0, 0.0, 0.0), find_zero_names(oracle, plain_grads))
    judged = [name for name in oracle if name not in bare.zero_names]
    plain_runs = [error_statistics(bare, grads, judged) for grads in plain_grads]
    limits = ErrorStatistics(
        max_error=LARGEST_FACTOR * max(run.max_error for run in plain_runs),
        rms_error=SPREAD_FACTOR * max(run.rms_error for run in plain_runs),
        scale_error=SCALE_FACTOR * (max(run.scale_error for run in plain_runs) + eps),
    )
    for name in bare.zero_names:
        # With this unit, an element may be LARGEST_FACTOR times as large as the largest error of a plain run.
        largest = find_largest_error(name, oracle[name], plain_grads)
        units[name] = torch.full_like(oracle[name], LARGEST_FACTOR * largest / (limits.max_error or 1.0))
    return replace(bare, limits=limits)


def find_zero_names(oracle: Grads, plain_grads: Sequence[Grads]) -> frozenset[str]:
    """Return the names of the tensors whose largest element is at most plain PyTorch's largest error in this tensor."""
    errors = {name: find_largest_error(name, truth, plain_grads) for name, truth in oracle.items()}
    return frozenset(
        name for name, truth in oracle.items() if errors[name] > 0 and float(truth.abs().max()) <= errors[name]
    )


def find_largest_error(name: str, truth: Tensor, plain_grads: Sequence[Grads]) -> float:
    """Return the largest difference between ``truth`` and the gradients ``name``, or 0 if there are no elements."""
    return max(float((grads[name].double() - truth).abs().max()) for grads in plain_grads) if truth.numel() else 0.0


def error_statistics(calibration: Calibration, grads: Grads, names: Sequence[str] | None = None) -> ErrorStatistics:
    """Return the error statistics of one run with the gradients ``grads``.

    The largest error is that of the tensors ``names``, by default of all; the other statistics leave out tensors that
    would be zero without rounding.
    """
    z = {name: tensor.flatten() for name, tensor in calibration.normalized_errors(grads).items()}
    sized = torch.cat([tensor for name, tensor in z.items() if names is None or name in names])
    scaled = [name for name in z if name not in calibration.zero_names]
    spread = torch.cat([z[name] for name in scaled]) if scaled else torch.zeros(1, dtype=torch.float64)
    scale_errors = [fit_scale_error(calibration, grads, name) for name in scaled]
    return ErrorStatistics(
        float(sized.abs().max()) if sized.numel() else 0.0,
        float(spread.square().mean().sqrt()),
        max(scale_errors, default=0.0),
    )


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
    smallest scale error that is certain to be detected in each tensor whose scale is judged, or infinity without any.
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
        smallest_detectable=2 * limits.scale_error if judges_scale(calibration) else torch.inf,
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
    named = replace(location, name=worst)
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


def judges_scale(calibration: Calibration) -> bool:
    """Return whether any tensor has a scale that can be judged: nonzero elements that are larger than the rounding."""
    return any(bool(calibration.oracle[name].any()) for name in calibration.oracle.keys() - calibration.zero_names)


def ratio_to_limit(value: float, limit: float) -> float:
    """Return ``value / limit``; return infinity if ``value`` is NaN, or if ``limit`` is 0 and ``value`` is not."""
    if value != value:
        return torch.inf
    return value / limit if limit else (torch.inf if value else 0.0)
