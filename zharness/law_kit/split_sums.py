"""Compare gradients at weights that are no integers on tp, where ranks add up a local gradient in parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.errors import RoundedScenarioError
from zharness.law_kit.hints import hint_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.mesh import TENSOR
from zharness.parity import Comparison, Part, compare_ranks
from zharness.parity.calibration import Calibration, MeanTerm, calibrate_mean_at, calibrate_sum, compare_calibrated
from zharness.parity.certificate import certify_exactness


def splits_sums(ctx: JudgeContext) -> bool:
    """Return whether tp adds up sums of the cell's model in parts and rounds them, so that no bound of them holds."""
    return TENSOR in ctx.mesh.axes and not ctx.baseline.spec.exact


def require_exact_sums(ctx: JudgeContext, micro_batches: range, params: Mapping[str, Tensor]) -> bool:
    """Return whether tp may add up sums of an exact model in parts, because no sum is rounded with weights ``params``.

    Without tp, and for a model with random weights, the result is False. Raises RoundedScenarioError if a sum of
    ``micro_batches`` is rounded in float32.
    """
    if TENSOR not in ctx.mesh.axes or splits_sums(ctx):
        return False
    exact = bool(certify_exactness(ctx.baseline, micro_batches, ctx.dtype, params=params))
    if ctx.dtype is torch.float32 and not exact:
        numbers = ", ".join(map(str, micro_batches))
        raise RoundedScenarioError(f"a sum of the micro-batches {numbers} is rounded, so no engine can be judged by it")
    return exact


def compare_split_grads(
    ctx: JudgeContext, label: str, step: int = 0, params: Mapping[str, Tensor] | None = None
) -> Iterator[Comparison]:
    """Compare a micro-batch's reduced gradients with float64 by tier C, and the gradients of all ranks with each other.

    ``params`` are the weights of the step (None: the initial weights).
    """
    yield from compare_with_oracle(ctx, label, step, calibrate_mean_at(params, ctx.baseline, ctx.data_size, step))


@dataclass(frozen=True)
class SplitBatches:
    """The expected gradients of several batches: ``scale`` times the mean over their micro-batches.

    ``factors`` maps the number of each micro-batch to the factor of its loss. ``params`` are the weights of all
    micro-batches (None: the initial weights), and ``frozen`` has the names of weights without a gradient.
    """

    factors: Mapping[int, float]
    params: Mapping[str, Tensor] | None = None
    scale: float = 1.0
    frozen: Collection[str] = ()


def compare_split_batches(ctx: JudgeContext, label: str, step: int, batches: SplitBatches) -> Iterator[Comparison]:
    """Compare the gradients recorded at ``step`` by tier C, and the gradients of all ranks with each other."""
    ranks = range(ctx.data_size)
    terms = [MeanTerm(rank, micro, factor) for micro, factor in batches.factors.items() for rank in ranks]
    calibrated = calibrate_sum(batches.params, ctx.baseline, terms, batches.scale, batches.frozen)
    yield from compare_with_oracle(ctx, label, step, calibrated)


def compare_with_oracle(ctx: JudgeContext, label: str, step: int, calibrated: Calibration) -> Iterator[Comparison]:
    """Compare reduced gradients with the float64 gradients of ``calibrated``, and compare all ranks with each other."""
    rank_grads = ctx.rank_records(label, step)
    ctx.check_gradient_names(calibrated.oracle.keys(), rank_grads[0])
    grads = {name: rank_grads[0][name].double() for name in calibrated.oracle}
    compared = compare_calibrated(ctx.location("", Part.REDUCTION, step, rank=0), calibrated, grads)
    yield hint_factor(compared, grads, calibrated.oracle)
    for name in calibrated.oracle:
        yield from compare_ranks(ctx.location(name, Part.REDUCTION, step), [record[name] for record in rank_grads])
