"""Explain a wrong gradient of a pipeline in which a stage reads the bits of its outputs' gradients as integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import list_owned_spans
from zharness.mesh import PIPELINE
from zharness.parity import Comparison
from zharness.parity.attribution import is_close_to_mean
from zharness.workload import Batch

HINT = "stages that also receive activations read the bits of the gradients of their outputs as integers"


def hint_integer_gradients(
    ctx: JudgeContext,
    comparison: Comparison,
    columns: Sequence[Sequence[Batch]],
    weights: Mapping[str, Tensor] | None = None,
    step: int = 0,
) -> Comparison:
    """Add a hint to a mismatch of a gradient if inner stages that read gradients as integers would give it.

    The gradients were recorded at ``step``, with the weights ``weights``, after the micro-batches ``columns`` of each
    data coordinate.
    """
    mismatch = comparison.mismatch
    if mismatch is None or mismatch.parameter not in ctx.baseline.parameter_names:
        return comparison
    name, (first, *_) = mismatch.parameter, columns
    grad = ctx.rank_records("grads", step)[mismatch.seen_on][name]
    for divisor in (1, len(first)):
        misread = [run_with_integer_gradients(ctx, batches, weights, divisor).get(name) for batches in columns]
        found = [each for each in misread if each is not None]
        if found and is_close_to_mean(grad, found, 1, ctx.reduce_dtype):
            return add_hint(comparison, HINT)
    return comparison


def run_with_integer_gradients(
    ctx: JudgeContext, batches: Sequence[Batch], weights: Mapping[str, Tensor] | None, divisor: int
) -> Mapping[str, Tensor]:
    """Return the gradients of a batch if inner stages read the gradients of their outputs as integers.

    The engine divides the losses by ``divisor``. It divides the gradients by the number of micro-batches divided by
    ``divisor``.
    """
    model = ctx.baseline.build_module(weights)
    inner = range(1, ctx.mesh.size(PIPELINE) - 1)
    for name in ctx.baseline.spec.pp_plan:
        if find_stage(ctx, f"{name}.linear.weight") in inner:
            model.get_submodule(name).register_forward_hook(misread_gradient)
    for batch in batches:
        (ctx.baseline.objective(batch.feed(model), batch) / divisor).backward()  # type: ignore[no-untyped-call]
    left = len(batches) // divisor
    return {name: param.grad / left for name, param in model.named_parameters() if param.grad is not None}


def find_stage(ctx: JudgeContext, name: str) -> int:
    """Return the coordinate on pp of the first rank that owns a part of the parameter, or -1 if there is none."""
    parameters = dict(ctx.baseline.build_module().named_parameters())
    elements = parameters[name].numel() if name in parameters else 0
    owners = (rank for rank in range(ctx.world_size) if elements and list_owned_spans(ctx, rank, name, elements))
    return next((ctx.mesh.coordinates(rank, ctx.world_size)[PIPELINE] for rank in owners), -1)


def misread_gradient(_module: Any, _inputs: Any, output: Any) -> None:
    """Read the bits of an output's gradient as integers if the output follows an output of integers."""
    if isinstance(output, tuple) and not output[0].is_floating_point():
        output[1].register_hook(lambda grad: grad.contiguous().view(torch.int32).to(grad.dtype))
