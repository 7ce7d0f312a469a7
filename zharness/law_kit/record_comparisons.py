"""Define comparisons of recorded weights, losses and other tensors that several laws use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import Comparison, Mismatch, Part, compare_bitwise, compare_ranks
from zharness.parity.baseline import LocalResult
from zharness.parity.compare import check_names

STALE_FORWARD_HINT = "the forward used the weights from before"
EXCEPT_VECTORS = ", except vectors"  # appended to STALE_FORWARD_HINT: an engine may leave vectors unsharded
OUTSIDE_ALONE = ", of parameters outside of submodules alone"  # appended too: an engine may shard by submodules
ROUNDED_WEIGHT_HINT = "it is the initial weight, rounded"
LATE_REPORT_HINT = "the forward used weights that the engine reported only at"


def compare_initial_weights(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the weights that the engine reports before training equal the model's initial weights.

    If the engine rounded the weight to the cell's dtype, the hint of the mismatch says so.
    """
    wanted = dict(ctx.baseline.build_module().named_parameters())
    record = ctx.rank_records("params", 0)[0]
    check_names("full_params", wanted, record)
    for name, tensor in wanted.items():
        found = compare_bitwise(ctx.location(name, Part.GATHER), tensor.detach(), record[name])
        is_rounded = torch.equal(tensor.detach().to(ctx.dtype), record[name].to(ctx.dtype))
        yield add_hint(found, ROUNDED_WEIGHT_HINT) if is_rounded else found


def compare_forward(
    ctx: JudgeContext, step: int, local: list[LocalResult], micro: int | None = None
) -> Iterator[Comparison]:
    """Compare the losses with those that the baseline computes from the weights that the engine reports.

    If a wrong loss equals the loss with the weights from before the last step, the mismatch is attributed to the gather
    of weights. ``micro`` is the number of the micro-batch; if it is None, the number is ``step``.
    """
    micro_step = step if micro is None else micro
    for comparison in ctx.compare_losses(micro_step, local):
        if comparison.mismatch is None or step == 0:
            yield comparison
        else:
            yield replace(comparison, mismatch=blame_stale_weights(ctx, step, micro_step, comparison.mismatch))


def blame_stale_weights(ctx: JudgeContext, step: int, micro: int, mismatch: Mismatch) -> Mismatch:
    """Attribute a mismatch to the gather of weights if the loss was computed from the weights of another step.

    The other weights are the weights before the last step (all of them, or all except the vectors), or the weights that
    the engine reported only at the next step.
    """
    recorded = {snapshot.step for snapshot in ctx.evidence[0].snapshots if snapshot.label == "params"}
    candidates = (
        (step - 1, step - 1, f"{STALE_FORWARD_HINT} step {step - 1}"),
        (step - 1, step, f"{STALE_FORWARD_HINT} step {step - 1}{EXCEPT_VECTORS}"),
        (step + 1, step + 1, f"{LATE_REPORT_HINT} step {step + 1}"),
    )
    for *steps, hint in candidates:
        if recorded.issuperset(steps):
            weights, vectors = (ctx.rank_records("params", at)[0] for at in steps)
            if matches_plain_loss(ctx, micro, mismatch, replace_vectors(weights, vectors)):
                return replace(mismatch, part=Part.GATHER, hint=hint)
    return mismatch


def matches_plain_loss(ctx: JudgeContext, micro: int, mismatch: Mismatch, params: Mapping[str, Tensor] | None) -> bool:
    """Return whether the wrong loss equals plain PyTorch's loss with ``params``, computed with or without gradients.

    If ``params`` is None, these are the initial weights.
    """
    at = ctx.data_coordinate(mismatch.seen_on)
    losses = [ctx.baseline.run_rank(at, micro, params).loss]
    with torch.no_grad():
        losses.append(ctx.baseline.run_forward(at, micro, params).loss)
    return mismatch.actual in map(float, losses)


def replace_vectors(weights: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``weights`` with the tensors of one dimension taken from ``vectors``."""
    return {name: vectors[name] if weight.dim() == 1 else weight for name, weight in weights.items()}


def mix_old_weights(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return weights of which all, all but the vectors, or those outside of submodules are ``old``.

    The keys are the texts that a hint appends.
    """
    own = {name: weight for name, weight in old.items() if "." not in name}
    return {"": dict(old), EXCEPT_VECTORS: replace_vectors(old, new), OUTSIDE_ALONE: {**new, **own}}


def compare_records(
    ctx: JudgeContext, expected_label: str, actual_label: str, expected_step: int, step: int, part: Part
) -> Iterator[Comparison]:
    """Check that each rank's tensors under ``actual_label`` and under ``expected_label`` are bitwise equal."""
    pairs = zip(ctx.rank_records(expected_label, expected_step), ctx.rank_records(actual_label, step), strict=True)
    for rank, (expected, found) in enumerate(pairs):
        check_names(f"what a rank reports as {actual_label}", expected, found)
        for name, tensor in expected.items():
            yield compare_bitwise(ctx.location(name, part, step, rank), tensor, found[name])


def compare_record_of_ranks(ctx: JudgeContext, label: str, step: int, made_in: int) -> Iterator[Comparison]:
    """Check that all ranks recorded the same names and values under ``label`` at ``step``.

    ``made_in`` is the number of the step that a mismatch names. Raise EngineContractError, which names the rank and the
    names, if the names differ.
    """
    records = ctx.rank_records(label, step)
    for rank, record in enumerate(records[1:], start=1):
        check_names(f"the record {label!r} of rank {rank}, compared with that of rank 0,", records[0], record)
    for name in records[0]:
        yield from compare_ranks(ctx.location(name, Part.GATHER, made_in), [record[name] for record in records])


UNBOUNDED_ERROR = torch.finfo(torch.float64).max  # the bound of an undetermined value: every finite number is within it
