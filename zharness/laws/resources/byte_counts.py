"""Define laws on the bytes that a rank stores, sends and gathers: they obey the formulas of the ZeRO paper.

The formulas are in Rajbhandari et al., "ZeRO", sections 5 and 7. In them, psi is the number of bytes of all parameters,
and N is the world size. On a mesh, psi is the number of bytes of the parameters that one tp rank holds, N is the number
of shards, and gradients are also reduced over the copies of each shard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

from zharness.engines.protocol import AccumulationOwner, Feature, Resources, Traffic
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import PLAIN_ADAMW, ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.resources.common import (
    ACCUMULATIONS,
    Division,
    divide_parameters,
    read_stage,
    record_stage,
    require_observation,
    resource_law,
    two_largest_modules_bytes,
)
from zharness.parity import Comparison, Part, compare_bitwise, compare_within_range


def observe_memory_per_rank(ctx: RankContext) -> None:
    """Train two steps, and record the bytes of parameters, gradients and optimizer state that this rank stores."""
    record_stage(ctx)
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    for step in range(2):
        loss = ctx.loss(engine, step)
        between_passes = require_observation(engine, "resources", Resources)
        engine.backward(loss)
        engine.backward(ctx.loss(engine, 2 + step))  # accumulated gradients take no more bytes than one gradient
        before = require_observation(engine, "resources", Resources)
        engine.step()
        engine.zero_grad()
    after = require_observation(engine, "resources", Resources)
    sizes = {"gradients": before.gradients, "parameters": after.parameters, "optimizer_state": after.optimizer_state}
    sizes[PARAMETERS_AFTER_FORWARD] = between_passes.parameters
    ctx.record("sizes", {name: scalar(value) for name, value in sizes.items()})
    engine.close()


PARAMETERS_AFTER_FORWARD = "parameters behind a forward"


def judge_memory_per_rank(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check a rank's bytes: psi for parameters, psi for gradients, and 2 psi for AdamW's optimizer state.

    Each of these numbers is divided by N at the stages that shard it; padding and AdamW's step counts are added. If
    parameters are sharded, the parameters of at most two modules may stay gathered between a forward and its backward.
    """
    for division in divide_parameters(ctx):
        yield from judge_memory_of_division(ctx, division)


def judge_memory_of_division(ctx: JudgeContext, division: Division) -> Iterator[Comparison]:
    """Compare the bytes of the ranks of ``division`` with the formulas."""
    stage, sizes = read_stage(ctx), division.sizes
    shards = [largest_shard_numel(ctx, name, division) for name in division.shapes]
    for name, records, shards_from in (("parameters", 1, 3), ("gradients", 1, 2), ("optimizer_state", 2, 1)):
        ranks = division.shards if stage >= shards_from else 1
        share = records * 4 * sum(sizes) / ranks
        padding = records * 4 * (sum(shards) - sum(sizes) / ranks) if ranks > 1 else 0
        counts = 4 * len(sizes) if name == "optimizer_state" else 0
        for rank in division.ranks:
            record = ctx.rank_records("sizes")[rank]
            place = ctx.location(name, Part.GATHER, 0, rank)
            at_most = share + padding + counts
            # The last shard may be shorter by the padding of the other shards.
            least = share - padding * max(1, ranks - 1)
            yield compare_within_range(place, scalar(least), record[name], scalar(at_most))
            if name == "parameters" and stage >= shards_from:
                used = ctx.location(PARAMETERS_AFTER_FORWARD, Part.GATHER, 0, rank)
                most = scalar(at_most + two_largest_modules_bytes(division))
                yield compare_within_range(used, scalar(0), record[PARAMETERS_AFTER_FORWARD], most)


def largest_shard_numel(ctx: JudgeContext, name: str, division: Division) -> int:
    """Return the number of elements in the largest padded shard of the parameter ``name``.

    The parameter is split into equal numbers of elements, or into rows if the engine's layout says so.
    """
    shape, shards = division.shapes[name], division.shards
    even, by_rows = -(-math.prod(shape) // shards), -(-shape[0] // shards) * math.prod(shape[1:])
    declared: Counter[int] = Counter()
    for piece in ctx.evidence[0].layout.get(name, ()):
        if piece.rank in division.ranks:
            declared[piece.rank] += piece.stop - piece.start
    return by_rows if max(declared.values(), default=0) == by_rows else even


def observe_comm_volume(ctx: RankContext) -> None:
    """Record the number of bytes that one step sends, for each number of micro-batches."""
    record_stage(ctx)
    for steps in ACCUMULATIONS:
        engine = ctx.build_engine(
            optimizer=ZERO_LR_SGD, accumulation_steps=steps, accumulation_owner=AccumulationOwner.ENGINE
        )
        start = require_observation(engine, "traffic", Traffic).sent
        for micro in range(steps):
            batch = ctx.batch(micro)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
        ctx.record("sent", {"sent": scalar(require_observation(engine, "traffic", Traffic).sent - start)}, steps)
        engine.close()


def judge_comm_volume(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check the bytes sent: 2 psi at stages 0 and 1, (A+1) psi at stage 2, and 2A to 3A psi at stage 3.

    A is the number of micro-batches. Each of these numbers is multiplied by (N-1)/N, where N is the number of shards.
    Stage 3 sends less than 3A psi if backward does not gather the parameters again. With C copies of the weights, each
    reduction also sends 2 (C-1)/C of a shard.
    """
    for division in divide_parameters(ctx):
        yield from judge_volume_of_division(ctx, division)


def judge_volume_of_division(ctx: JudgeContext, division: Division) -> Iterator[Comparison]:
    """Compare the bytes that the ranks of ``division`` sent of parameters and gradients with the formulas."""
    stage = read_stage(ctx)
    sizes, ranks, copies = division.sizes, division.shards, division.copies
    psi = 4.0 * sum(sizes)
    for steps in ACCUMULATIONS:
        passes = {0: 2, 1: 2, 2: steps + 1, 3: 3 * steps}[stage]
        padding = 4 * ranks * len(sizes) * passes
        # Each pass all-reduces one byte for every parameter, bucket and loss over all ranks; not counted with copies.
        agreement = 2 * (2 * len(sizes) + 8) * (steps + 1) if copies == 1 else 0
        least = 2 * steps * psi if stage == 3 else passes * psi
        most = passes * psi + padding + agreement
        share = (ranks - 1) / ranks
        over_copies = (1 if stage < 2 else steps) * 2 * (copies - 1) / copies
        least, most = (
            share * least + over_copies * psi / ranks,
            share * most + over_copies * (psi / ranks + 4 * len(sizes)),
        )
        for rank in division.ranks:
            sent = ctx.rank_records("sent", steps)[rank]["sent"]
            place = ctx.location("sent", Part.REDUCTION, steps, rank)
            yield compare_within_range(place, scalar(least), sent, scalar(most))


PREFETCH_BUCKET_SIZES = (0, 100)  # elements that stage 3 gathers in one collective


def observe_gathered_bytes(ctx: RankContext) -> None:
    """Train two steps with each bucket size, and record the final number and the peak of gathered bytes."""
    record_stage(ctx)
    for bucket in PREFETCH_BUCKET_SIZES:
        zero = {"zero_optimization": {"stage3_prefetch_bucket_size": bucket}}
        engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=zero)
        for step in range(2):
            batch = ctx.batch(step)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            engine.zero_grad()
        counts = {
            "rest": require_observation(engine, "gathered_bytes", int),
            "peak": require_observation(engine, "traffic", Traffic).peak_gathered,
        }
        ctx.record("gathered", {name: scalar(value) for name, value in counts.items()}, bucket)
        engine.close()


def judge_gathered_bytes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that no bytes are gathered between steps, and that the peak is at most two modules and a bucket.

    Below stage 3, the peak has to be 0.
    """
    for division, bucket in product(divide_parameters(ctx), PREFETCH_BUCKET_SIZES):
        # A bucket may hold parameters of one element, each padded to one element on every rank.
        padded = bucket * division.shards
        most = two_largest_modules_bytes(division) + 4 * padded if read_stage(ctx) == 3 else 0
        for rank in division.ranks:
            record = ctx.rank_records("gathered", bucket)[rank]
            yield compare_bitwise(ctx.location("rest", Part.GATHER, 0, rank), scalar(0), record["rest"])
            yield compare_within_range(
                ctx.location("peak", Part.GATHER, 0, rank), scalar(0), record["peak"], scalar(most)
            )


LAWS = (
    resource_law(
        "memory_per_rank",
        "on every rank, parameters, gradients and optimizer state take as many bytes as the stage's formula says",
        observe_memory_per_rank,
        judge_memory_per_rank,
        Feature.RESOURCES,
        kept_because="the only law that counts the bytes that a rank stores",
    ),
    resource_law(
        "comm_volume",
        "a step of A micro-batches sends 2 psi (stages 0, 1), (A+1) psi (2), at most 3A psi (3), times (N-1)/N",
        observe_comm_volume,
        judge_comm_volume,
        Feature.TRAFFIC,
        Feature.ENGINE_ACCUMULATION,
        kept_because="the only law that counts the bytes that a rank sends",
    ),
    resource_law(
        "gathered_bytes",
        "nothing stays gathered between steps, and the peak is at most the two largest modules and a bucket",
        observe_gathered_bytes,
        judge_gathered_bytes,
        Feature.TRAFFIC,
        kept_because="the only law that limits the peak of gathered bytes",
    ),
)
