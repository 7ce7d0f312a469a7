"""Define the law pipeline.replicas: ranks of a pipeline that hold the same weight have bitwise equal tensors of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.other_norms import Spans
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.stage_owners import find_stages, get_stage, judge_owners_of_stages
from zharness.laws.mesh import compare_replicas
from zharness.laws.pipeline import (
    CLIP,
    DEFAULT_SHAPE,
    MICRO_BATCHES,
    MOMENTUM_SGD,
    SCHEDULES,
    compute_batch,
    pipeline_law,
    select_schedule,
    train_batch,
)
from zharness.parity import Comparison, Part, compare_ranks
from zharness.parity.baseline import LocalResult
from zharness.parity.compare import check_names


def observe_replicas(ctx: RankContext) -> None:
    """Make one step, and record gradients after the batch, and weights, optimizer state and the norm after the step.

    Each rank records its own copies of the tensors in its stages.
    """
    ctx.record("stage", {"stage": scalar(ctx.config.stage)})
    clip = CLIP if ctx.capabilities.refusal(Feature.CLIP) is None else None
    engine = ctx.build_engine(optimizer=MOMENTUM_SGD, options=select_schedule(ctx.variant), clip=clip)
    train_batch(ctx, engine, 0, DEFAULT_SHAPE)
    ctx.record("gradients", engine.full_grads())
    engine.step()
    norm = engine.grad_norm()
    ctx.record("norm", {} if norm is None else {"norm": scalar(norm)})
    engine.zero_grad()
    ctx.record("weights", engine.full_params())
    ctx.record_optimizer_state("state", engine, 0)
    engine.close()


def judge_replicas(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each stage's tensors between the ranks along each axis, and the norms that all ranks report."""
    micros = compute_batch(ctx, 0)
    for label, part in (("gradients", Part.REDUCTION), ("weights", Part.OPTIMIZER), ("state", Part.OPTIMIZER)):
        records = ctx.rank_records(label)
        for record in records[1:]:
            check_names(f"the {label} of ranks", records[0], record)
        for name, tensor in records[0].items():
            spans = list_stage_spans(ctx, name.partition("/")[0], tensor.numel())
            for comparison in compare_replicas(ctx, name, part, spans, [record[name] for record in records]):
                yield hint_not_reduced(ctx, comparison, micros) if label == "gradients" else comparison
    yield from judge_owners_of_stages(ctx)
    yield from compare_norms(ctx)


def compare_norms(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that all ranks report the same norm, or that no rank reports a norm."""
    place, norms = ctx.location("norm", Part.REDUCTION), ctx.rank_records("norm")
    yield from compare_ranks(place, [scalar(len(record)) for record in norms])
    if norms[0]:
        yield from compare_ranks(place, [record["norm"] for record in norms])


def list_stage_spans(ctx: JudgeContext, name: str, elements: int) -> list[Spans]:
    """Return, for each rank, all elements of a parameter if the rank's stage holds it, else no elements.

    All elements count even if ``layout()`` gives the rank only a shard: the rank recorded its own full copy, or the
    all-gathered shards.
    """
    stages = find_stages(ctx, name, elements)
    return [((0, elements),) if get_stage(ctx, rank) in stages else () for rank in range(ctx.world_size)]


def hint_not_reduced(ctx: JudgeContext, comparison: Comparison, micros: Sequence[Sequence[LocalResult]]) -> Comparison:
    """Add a hint to a mismatch of a gradient if it is the gradient of the rank's own data, which was never reduced."""
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    name, rank = mismatch.parameter, mismatch.seen_on
    own = torch.stack([row[ctx.data_coordinate(rank)].grads[name] for row in micros]).mean(dim=0)
    grads: Mapping[str, Tensor] = ctx.rank_records("gradients")[rank]
    hint = "it is the gradient of the rank's own data alone, not reduced"
    hints = "; ".join(filter(None, (mismatch.hint, hint)))
    return add_hint(comparison, hints) if torch.equal(grads[name], own) else comparison


LAWS = (
    pipeline_law(
        "replicas",
        "ranks that hold a weight have equal weights, gradients and state, and are the owners that the engine claims",
        observe_replicas,
        judge_replicas,
        tuple(Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES) for name in SCHEDULES),
        models=("chain", "tied_chain", "tied_ends"),
        kept_because="the only law of a pipeline that compares ranks of one stage, and stages with a tied weight",
    ),
)
