"""Compare gradients at weights that are no integers on tp, which adds up sums of a local gradient in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zharness.errors import RoundedScenarioError
from zharness.law_kit.hints import hint_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.mesh import TENSOR
from zharness.parity import Comparison, Part, compare_ranks
from zharness.parity.calibration import calibrate_mean_at, compare_calibrated
from zharness.parity.certificate import certify_exactness


def splits_sums(ctx: JudgeContext) -> bool:
    """Return whether the sums of the cell's model are added up in parts and rounded, so that no bound of them holds."""
    return TENSOR in ctx.mesh.axes and not ctx.baseline.spec.exact


def require_exact_sums(ctx: JudgeContext, micro_batches: range, params: Mapping[str, Tensor]) -> bool:
    """Return whether tp may add up the sums of an exact model in parts, as none is rounded at the weights ``params``.

    Without tp nothing is certified. Raises RoundedScenarioError if a sum of ``micro_batches`` is rounded in float32.
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
    """Compare the reduced gradients of a micro-batch by tier C with float64, and those of all ranks with each other.

    ``params`` are the weights of the step (None: the initial ones).
    """
    rank_grads = ctx.rank_records(label, step)
    calibrated = calibrate_mean_at(params, ctx.baseline, ctx.data_size, step)
    ctx.check_gradient_names(calibrated.oracle.keys(), rank_grads[0])
    grads = {name: rank_grads[0][name].double() for name in calibrated.oracle}
    compared = compare_calibrated(ctx.location("", Part.REDUCTION, step, rank=0), calibrated, grads)
    yield hint_factor(compared, grads, calibrated.oracle)
    for name in calibrated.oracle:
        yield from compare_ranks(ctx.location(name, Part.REDUCTION, step), [record[name] for record in rank_grads])
