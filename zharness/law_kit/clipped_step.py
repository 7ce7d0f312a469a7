"""Judge a step with clipped gradients by the norm of the gradients themselves, and name the norm that clipped them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zharness.engines.protocol import OptimizerSpec
from zharness.law_kit.clipping import CLIP_ROUNDINGS, ClipFactor
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.other_norms import iter_other_norms
from zharness.law_kit.rank_context import scalar
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.mesh import TENSOR
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult, Objective, convert_to_float64, run_local
from zharness.parity.bounds import gamma
from zharness.workload import Batch

HINT_ROUNDINGS = CLIP_ROUNDINGS + 61  # of the weights that give a step's factor, and of the norm


def judge_clipped_step(ctx: JudgeContext, spec: OptimizerSpec, limit: float, params_label: str) -> Iterator[Comparison]:
    """Compare the first step with a step of gradients that are clipped to ``limit`` by the norm of all gradients.

    The norm is that of the recorded gradients, whether or not the engine reports it. ``spec`` is SGD.
    """
    grads = ctx.rank_records("grads")[0]
    norm, error = total_norm_and_bound(grads)
    factor = ClipFactor.from_norm(limit, norm, error, None)
    errors = bound_clipped_parts(ctx, partial(compute_first_absolute_grads, ctx))
    for comparison in judge_step(ctx, spec, grads, RecordedStep(0, params_label), factor, errors):
        yield hint_clipping_norm(ctx, comparison, grads, limit, float(spec.args["lr"]), params_label)
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def bound_clipped_parts(
    ctx: JudgeContext, compute_absolute: Callable[[], Sequence[Sequence[LocalResult]]], scale: float = 1.0
) -> Mapping[str, Tensor]:
    """Return error bounds, by name, of gradients that tp clips as sums of parts; empty for a model without them.

    If the ranks of tp use a whole weight on parts of a sequence, DTensor leaves its gradient in parts, one on each of
    the N ranks. Clipping rounds N products, and the optimizer then adds up the parts with N - 1 roundings. ``scale``
    times the mean of the gradients' absolute terms bounds these errors.
    """
    if TENSOR not in ctx.mesh.axes or not any("sequence" in word for word in ctx.baseline.spec.tp_plan.values()):
        return {}
    terms = ctx.compute_expected_grads(compute_absolute(), scale, {})
    return {name: gamma(ctx.mesh.size(TENSOR), each.dtype) * each.value for name, each in terms.items()}


def compute_absolute_grads(
    ctx: JudgeContext, batches: Sequence[Batch], objective: Objective, weights: Mapping[str, Tensor] | None = None
) -> list[LocalResult]:
    """Return each rank's float64 gradients of a model and a micro-batch whose numbers are absolute values."""
    module = ctx.baseline.build_module(weights)
    return [run_local(*convert_to_float64(module, batch, take_abs=True), objective) for batch in batches]


def compute_first_absolute_grads(ctx: JudgeContext) -> list[list[LocalResult]]:
    """Return the gradients of absolute values of the first micro-batch."""
    batches = [ctx.baseline.batch(at, 0) for at in range(ctx.data_size)]
    return [compute_absolute_grads(ctx, batches, ctx.baseline.objective)]


def hint_clipping_norm(
    ctx: JudgeContext, comparison: Comparison, grads: Mapping[str, Tensor], limit: float, rate: float, params_label: str
) -> Comparison:
    """Add to a mismatch the norm by which the step clipped, and what this norm is. ``rate`` is the learning rate."""
    if comparison.mismatch is None:
        return comparison
    name = comparison.mismatch.parameter.partition("/")[0]  # the name of a weight, also for its optimizer state
    if name not in grads:
        return comparison
    before, after = (ctx.rank_records(params_label, step)[0][name].double() for step in (0, 1))
    grad = grads[name].double().flatten()
    at = int(grad.abs().argmax())
    moved = float((before - after).flatten()[at])
    if moved == 0:
        return comparison
    clip_norm, right_norm = abs(limit * rate * float(grad[at]) / moved), total_norm_and_bound(grads)[0]
    if is_close(clip_norm, limit):
        return add_hint(comparison, f"the gradients were not clipped, and their norm is {right_norm:.6g}")
    hint = f"the gradients were clipped by the norm {clip_norm:.6g}, and their norm is {right_norm:.6g}"
    if is_close(clip_norm, float(right_norm)):
        return add_hint(comparison, hint)
    meaning = next((norm.meaning for norm in iter_other_norms(ctx, grads) if is_close(clip_norm, norm.value)), "")
    return add_hint(comparison, f"{hint}; {clip_norm:.6g} {meaning}" if meaning else hint)


def hint_other_norm(
    ctx: JudgeContext,
    comparison: Comparison,
    grads: Mapping[str, Tensor],
    limit: float,
    judge: Callable[[ClipFactor], Iterator[Comparison]],
) -> Comparison:
    """Add to a mismatch the norm with which ``judge`` would find no mismatch, and what this norm is."""
    if comparison.mismatch is None:
        return comparison
    error = total_norm_and_bound(grads)[1]
    for norm in iter_other_norms(ctx, grads):
        if all(each.mismatch is None for each in judge(ClipFactor.from_norm(limit, scalar(norm.value), error, None))):
            return add_hint(comparison, f"the gradients were clipped by {norm.value:.6g}, which {norm.meaning}")
    return comparison


def hint_norm_of_update(
    ctx: JudgeContext,
    grads: BoundedGrads,
    limit: float | None,
    factor: ClipFactor,
    judge: Callable[[ClipFactor], Iterator[Comparison]],
) -> Iterator[Comparison]:
    """Yield the comparisons of ``judge`` with ``factor``; a mismatch names the norm by which gradients were clipped.

    ``limit`` is None if gradients are not clipped.
    """
    values = {name: grad.value for name, grad in grads.items()}
    for comparison in judge(factor):
        yield comparison if limit is None or not grads else hint_other_norm(ctx, comparison, values, limit, judge)


def is_close(rounded: float, norm: float) -> bool:
    """Return whether ``rounded``, a norm that was computed from rounded weights, may be ``norm``."""
    return abs(rounded - norm) <= norm * gamma(HINT_ROUNDINGS, torch.float32)
