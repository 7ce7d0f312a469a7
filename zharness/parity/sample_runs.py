"""Run plain PyTorch on a micro-batch in several ways, from which tier C takes its limits.

The runs permute the samples, and split them into micro-batches of several sizes. Each sample gets the same random
numbers in all runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zharness.parity.baseline import Baseline, convert_to_float64, run_backward, run_local
from zharness.parity.sample_draws import SharedDrawError, find_sample_dims, permute_rows, record_draws, replay_draws
from zharness.parity.wide_floats import widen_named_dtypes
from zharness.workload import Batch

CALIBRATION_RUNS = 8
INDEPENDENCE_TOLERANCE = 2**-30  # far above float64's rounding, far below any dependence between samples

Grads = Mapping[str, Tensor]


@dataclass(frozen=True)
class SampleRuns:
    """Runs of plain PyTorch on samples of one rank's micro-batch. A sample has the same random numbers in every run.

    ``loss_weights`` has a factor for the loss of each rank; it is used only if a SyncBatchNorm joins the ranks.
    ``draws`` are the random tensors that the forward and backward of the whole micro-batch drew. ``sample_dims`` has,
    for each of these tensors, the dimension that counts samples. ``params`` are the weights (None: the initial ones).
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
        """Run the whole micro-batch to record what it draws, and half of it to find each sample's random numbers.

        Raises SharedDrawError.
        """

        def record_part(part: Batch) -> tuple[Tensor, ...]:
            """Return the random tensors that a run of ``part`` draws."""
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

        If a SyncBatchNorm joins the ranks, the result is the sum of the gradients of all ranks' weighted losses. Raises
        SharedDrawError if random numbers cannot be assigned to samples.
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
        except RuntimeError:  # the forward mixed two dtypes, as with a mask in fp32 or a cast to fp32
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


@dataclass(frozen=True)
class RecordedRuns:
    """A micro-batch's float64 gradients, the gradients of CALIBRATION_RUNS plain runs, and its samples' squares.

    ``squares`` has the sum, over the samples, of the square of each sample's share of a gradient. It is None if samples
    depend on each other.
    """

    oracle: Grads
    squares: Grads | None
    plain_grads: Sequence[Grads]


def record_runs(
    baseline: Baseline, rank: int, step: int, loss_weights: tuple[float, ...] = (), params: Grads | None = None
) -> RecordedRuns:
    """Run one rank's micro-batch in float64 and in plain PyTorch. Raises SharedDrawError.

    The plain runs permute the samples, so that sums over samples round in another order. If the order of the samples
    changes the gradients, there is one plain run without a permutation.
    """
    runs = SampleRuns.record(baseline, rank, step, loss_weights, params)
    oracle = dict(runs.compute_grads(torch.arange(runs.batch.num_samples), wide=True))
    squares = sum_squares_of_samples(runs, oracle)
    rows = torch.arange(runs.batch.num_samples)
    if squares is None and not are_near(runs.compute_grads(rows.flip(0), wide=True), oracle):
        return RecordedRuns(oracle, None, [runs.compute_grads(rows)])  # a model may fix a length for each position
    plain_grads = [run_permuted_plain(runs, number, squares is not None) for number in range(CALIBRATION_RUNS)]
    return RecordedRuns(oracle, squares, plain_grads)


def sum_squares_of_samples(runs: SampleRuns, oracle: Grads) -> Grads | None:
    """Return the sum, over the samples, of the square of each sample's share of the float64 gradient ``oracle``.

    One sample's gradients are in memory at a time. The result is None if the mean of the samples' gradients is not
    ``oracle``: samples depend on each other, or the loss is not a mean over samples. It is also None if the model
    refuses a single sample, as a batch norm does, or as a model does that expects a certain number of samples.
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
    """Return whether float64 gradients equal ``oracle`` up to rounding, so that the changed input did not matter."""
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
