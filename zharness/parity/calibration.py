"""Judge gradients of an engine's own kernels by the distance of torch's gradients from float64: tier C.

The oracle is the plain model's gradient in float64, computed from the same rounded weights and inputs. The error of an
element is z = (g - oracle) / s. Here s is the root of the sum of squares of the gradients of single samples, but at
least a tenth of the root mean square of s over the tensor. Eight runs of plain PyTorch, with permuted samples and
different micro-batch sizes, determine the limits of z; the engine under test never contributes to these limits. Such
limits miss small errors, so the reduction of local gradients that tier C judged is judged by tier S. On a mesh whose
ranks have parts of a local gradient, the mean of one backward is judged by tier C as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from zharness.parity.baseline import Baseline, convert_to_float64, run_backward, run_local
from zharness.parity.compare import build_mismatch
from zharness.parity.comparison import Comparison, MismatchTensors, TensorLocation, Tier
from zharness.parity.sample_draws import SharedDrawError, find_sample_dims, permute_rows, record_draws, replay_draws
from zharness.parity.wide_floats import widen_named_dtypes
from zharness.workload import Batch

CALIBRATION_RUNS = 8
# An engine may reach the plain runs' maximum times these factors, which were measured to separate right kernels
# from wrong ones.
LARGEST_FACTOR, SPREAD_FACTOR, SCALE_FACTOR = 2.0, 1.5, 4.0
INDEPENDENCE_TOLERANCE = 2**-30  # far above float64's rounding, far below any dependence between samples
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
    """The float64 gradients of one rank's micro-batch, the unit ``s`` of each element's error, and the error limits.

    ``zero_names`` are the tensors that would be zero without rounding, as the bias before a batch norm is. Only the
    size of their elements is judged.
    """

    oracle: Grads
    units: Grads
    limits: ErrorStatistics
    zero_names: frozenset[str] = frozenset()

    def normalized_errors(self, grads: Grads) -> dict[str, Tensor]:
        """Return, for each gradient in ``grads``, its difference from the float64 gradient in units of ``s``."""
        return {name: (grads[name].double() - truth) / self.units[name] for name, truth in self.oracle.items()}


@dataclass(frozen=True)
class SampleRuns:
    """Runs of plain PyTorch on some samples of one rank's micro-batch, each of which meets the same random numbers.

    ``loss_weights`` has a factor for the loss of each rank; it counts where a SyncBatchNorm joins the ranks. ``draws``
    are the random tensors that the forward and backward of the whole micro-batch drew, and ``sample_dims`` the
    dimension of each that counts samples. ``params`` are the weights (None: the initial ones).
    """

    baseline: Baseline
    rank: int
    step: int
    loss_weights: tuple[float, ...]
    draws: tuple[Tensor, ...]
    sample_dims: tuple[int, ...] = ()
    params: Grads | None = None

    @property
    def batch(self) -> Batch:
        """The micro-batch of the rank."""
        return self.baseline.batch(self.rank, self.step)

    @classmethod
    def record(
        cls, baseline: Baseline, rank: int, step: int, loss_weights: tuple[float, ...] = (), params: Grads | None = None
    ) -> SampleRuns:
        """Run the whole micro-batch to record what it draws, and half of it to find its samples in these numbers.

        Raises SharedDrawError.
        """

        def record_part(part: Batch) -> tuple[Tensor, ...]:
            """Return what a run of ``part`` draws."""
            model = baseline.build_module(params)  # outside the recording: initializing weights draws numbers too
            return record_draws(lambda: plain_gradients(baseline, model, part))

        batch = baseline.batch(rank, step)
        draws = record_part(batch)
        if not draws:
            return cls(baseline, rank, step, loss_weights, draws, params=params)
        half = batch.map_tensors(lambda tensor: tensor[: max(1, batch.num_samples // 2)])
        try:
            drawn_by_half = record_part(half)
        except Exception as error:
            raise SharedDrawError(f"the model does not run on half of its samples ({type(error).__name__})") from error
        return cls(baseline, rank, step, loss_weights, draws, find_sample_dims(draws, drawn_by_half), params)

    def compute_grads(self, rows: Tensor, wide: bool = False) -> Grads:
        """Return the gradients of the samples ``rows`` in a new plain model, in float64 if ``wide`` is set.

        Where a SyncBatchNorm joins the ranks, they are the sum over all ranks of what the weighted losses give.
        Raises SharedDrawError if random numbers cannot be assigned to samples.
        """
        chosen, model = self.batch.map_tensors(lambda tensor: tensor[rows]), self.baseline.build_module(self.params)
        if self.baseline.joins_ranks:
            return self._sum_over_ranks(chosen, wide)

        def run() -> Grads:
            """Run forward and backward of the chosen samples."""
            if wide:
                return run_local(*convert_to_float64(model, chosen), self.baseline.objective).grads
            return plain_gradients(self.baseline, model, chosen)

        def run_with_draws() -> Grads:
            """Run the samples with the random numbers that they have in the whole micro-batch."""
            return replay_draws(run, self.draws, rows, self.batch.num_samples, self.sample_dims)

        try:
            return run_with_draws()
        except RuntimeError:  # tensors of two dtypes, if the forward makes a mask in fp32 or casts to it
            if not wide:
                raise
            with widen_named_dtypes():
                return run_with_draws()

    def _sum_over_ranks(self, chosen: Batch, wide: bool) -> Grads:
        """Return the sum of all ranks' gradients of their weighted losses, where ``chosen`` is this rank's batch."""

        def run(rank: int) -> Grads:
            """Run forward and backward of one rank from its weighted loss."""
            batch = chosen if rank == self.rank else self.baseline.batch(rank, self.step)
            model = self.baseline.build_module(self.params)
            if wide:
                model, batch = convert_to_float64(model, batch)
            loss = self.baseline.objective(self.baseline.compute_output(model, batch), batch)
            return run_backward(model, loss * self.loss_weights[rank], self.baseline.loss_scale).grads

        parts = self.baseline.run_ranks(run)
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[self.rank]}

    def compute_mean_grads(self, order: Tensor, size: int, wide: bool = False) -> Grads:
        """Return the mean of the gradients of micro-batches of ``size`` samples, which follow each other in ``order``.

        Raises SharedDrawError as ``compute_grads`` does.
        """
        parts = [self.compute_grads(rows, wide) for rows in order.chunk(len(order) // size)]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) / len(parts) for name in names}


@lru_cache(maxsize=64)
def calibrate(baseline: Baseline, rank: int, step: int = 0, loss_weights: tuple[float, ...] = ()) -> Calibration:
    """Compute the calibration of one rank's micro-batch at the initial weights.

    The result does not depend on engine or stage, so each process computes it only once. If the loss is not a mean over
    independent samples, as with batch norm, the plain runs only permute the samples, and the unit of an element is its
    gradient. Where a SyncBatchNorm joins the ranks, the gradient is that of the sum of all ranks' losses times
    ``loss_weights``. Raises SharedDrawError if the random numbers of the forward cannot be assigned to samples.
    """
    part = record_runs(baseline, rank, step, loss_weights)
    return build_calibration(part.oracle, part.squares, part.plain_grads, baseline.eps)


def calibrate_mean_at(params: Grads | None, baseline: Baseline, ranks: int, step: int = 0) -> Calibration:
    """Compute the calibration of the mean gradient of all ranks' micro-batches at ``params`` (None: initial weights).

    Each plain run is the mean of the plain runs of all ranks, in the dtype of the model. Raises SharedDrawError as
    ``calibrate`` does.
    """
    parts = [record_runs(baseline, rank, step, params=params) for rank in range(ranks)]
    names = list(parts[0].oracle)
    oracle = {name: torch.stack([part.oracle[name] for part in parts]).mean(dim=0) for name in names}
    rank_squares = [part.squares for part in parts if part.squares is not None]
    squares = (
        {name: torch.stack([squares[name] for squares in rank_squares]).sum(dim=0) / ranks**2 for name in names}
        if len(rank_squares) == ranks
        else None
    )
    plain_grads = [
        {name: torch.stack([grads[name] for grads in runs]).mean(dim=0) for name in names}
        for runs in zip(*(part.plain_grads for part in parts), strict=False)
    ]
    return build_calibration(oracle, squares, plain_grads, baseline.eps)


calibrate_mean = lru_cache(maxsize=8)(partial(calibrate_mean_at, None))


@dataclass(frozen=True)
class RecordedRuns:
    """The float64 gradients of a micro-batch, those of CALIBRATION_RUNS plain runs, and what its samples add.

    ``squares`` are the sums of squares of what each sample adds, or None if samples depend on each other.
    """

    oracle: Grads
    squares: Grads | None
    plain_grads: Sequence[Grads]


def record_runs(
    baseline: Baseline, rank: int, step: int, loss_weights: tuple[float, ...] = (), params: Grads | None = None
) -> RecordedRuns:
    """Run one rank's micro-batch in float64 and in plain PyTorch. Raises SharedDrawError.

    The plain runs permute the samples, whose sums then round in another order, unless their order counts.
    """
    runs = SampleRuns.record(baseline, rank, step, loss_weights, params)
    oracle = dict(runs.compute_grads(torch.arange(runs.batch.num_samples), wide=True))
    squares = sum_squares_of_samples(runs, oracle)
    rows = torch.arange(runs.batch.num_samples)
    if squares is None and not are_near(runs.compute_grads(rows.flip(0), wide=True), oracle):
        return RecordedRuns(oracle, None, [runs.compute_grads(rows)])  # a model may know a length for each position
    plain_grads = [run_permuted_plain(runs, number, squares is not None) for number in range(CALIBRATION_RUNS)]
    return RecordedRuns(oracle, squares, plain_grads)


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
        # The limit of an element is then LARGEST_FACTOR times the largest element that a plain run had.
        largest = find_largest_error(name, oracle[name], plain_grads)
        units[name] = torch.full_like(oracle[name], LARGEST_FACTOR * largest / (limits.max_error or 1.0))
    return replace(bare, limits=limits)


def find_zero_names(oracle: Grads, plain_grads: Sequence[Grads]) -> frozenset[str]:
    """Return the names of the tensors whose largest element is not above the largest error of plain PyTorch in them."""
    errors = {name: find_largest_error(name, truth, plain_grads) for name, truth in oracle.items()}
    return frozenset(
        name for name, truth in oracle.items() if errors[name] > 0 and float(truth.abs().max()) <= errors[name]
    )


def find_largest_error(name: str, truth: Tensor, plain_grads: Sequence[Grads]) -> float:
    """Return the largest difference between ``truth`` and the gradients ``name``, or 0 if there are no elements."""
    return max(float((grads[name].double() - truth).abs().max()) for grads in plain_grads) if truth.numel() else 0.0


def sum_squares_of_samples(runs: SampleRuns, oracle: Grads) -> Grads | None:
    """Return the sum of squares of what every sample alone adds to the float64 gradient ``oracle``.

    One sample's gradients are in memory at a time. The result is None if the mean of the samples' gradients is not
    ``oracle``, as where samples depend on each other, or where the loss is not a mean over samples, or if the model
    refuses a single sample, as batch norm does, or a model that knows the number of samples.
    """
    count = runs.batch.num_samples
    means = {name: torch.zeros_like(truth) for name, truth in oracle.items()}
    squares = {name: torch.zeros_like(truth) for name, truth in oracle.items()}
    for row in torch.arange(count).chunk(count):
        try:
            grads = runs.compute_grads(row, wide=True)
        except SharedDrawError:
            raise
        except Exception:  # noqa: BLE001 - a user's model may raise anything; it has run on all samples together
            return None
        if grads.keys() != oracle.keys():
            return None
        for name, grad in grads.items():
            share = grad / count
            means[name] += share
            squares[name] += share.square_()
    return squares if are_near(means, oracle) else None


def are_near(grads: Grads, oracle: Grads) -> bool:
    """Return whether float64 gradients are ``oracle`` but for rounding, and so do not depend on what was changed."""
    size = max((float(truth.abs().max()) for truth in oracle.values() if truth.numel()), default=0.0)
    differences = (float((grads[name] - truth).abs().max()) for name, truth in oracle.items() if truth.numel())
    return max(differences, default=0.0) <= INDEPENDENCE_TOLERANCE * size


def run_permuted_plain(runs: SampleRuns, number: int, splits: bool = True) -> Grads:
    """Return the plain model's gradients of a batch whose samples are permuted and split into micro-batches.

    ``number`` is the seed of the permutation and determines the size of the micro-batches, over which the gradients are
    averaged. If ``splits`` is false, the permuted batch stays whole.
    """
    samples = runs.batch.num_samples
    order = permute_rows(samples, number)
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    return runs.compute_mean_grads(order, sizes[number % len(sizes)] if splits else samples)


def plain_gradients(baseline: Baseline, model: nn.Module, batch: Batch) -> Grads:
    """Return the gradients of ``batch`` in the plain ``model``, whose gradients have to be None."""
    loss = baseline.objective(baseline.compute_output(model, batch), batch)
    return run_backward(model, loss, baseline.loss_scale).grads


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
    """Return whether any tensor has a scale: elements that are not zero, and that are above the rounding."""
    return any(bool(calibration.oracle[name].any()) for name in calibration.oracle.keys() - calibration.zero_names)


def ratio_to_limit(value: float, limit: float) -> float:
    """Return ``value / limit``; return infinity if ``value`` is NaN, or if ``limit`` is 0 and ``value`` is not."""
    if value != value:
        return torch.inf
    return value / limit if limit else (torch.inf if value else 0.0)
