"""Define the law parameters.initial_weights: an engine that promises rank 0's weights trains with them on all ranks.

The other laws give all ranks the same seed, so a missing broadcast of weights changes no number there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature, OptimizerSpec
from zharness.law_kit.buffers import copy_buffers
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_initial_weights
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.compare import check_names

Tensors = Mapping[str, Tensor]

BUFFERS = "buffers"
MOMENTUM_SGD = OptimizerSpec(name="sgd", args={"lr": 1.0, "momentum": 0.5})


def add_buffers(model: nn.Module, rank: int) -> nn.Module:
    """Give ``model`` two buffers that contain the number of the rank, and return it."""
    model.register_buffer("seen", torch.full((3,), float(rank)))
    model.register_buffer("count", torch.tensor(rank))
    return model


def observe_initial_weights(ctx: RankContext) -> None:
    """Build the engine around a model with different weights on each rank, make a step, and record weights and step."""
    model = ctx.spec.model(ctx.seed + ctx.rank)
    if ctx.variant == BUFFERS:
        add_buffers(model, ctx.rank)
    engine = ctx.build_engine_from_rank_0(model, optimizer=MOMENTUM_SGD)
    ctx.record_training_state(engine, 0)
    ctx.record("buffers", copy_buffers(engine.module))
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    engine.step()
    engine.zero_grad()
    ctx.record_training_state(engine, 1)
    engine.close()


def judge_initial_weights(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each rank's weights and buffers with rank 0's, and the step with plain PyTorch's from these weights."""
    yield from compare_initial_weights(ctx)
    weights = ctx.rank_records("params", 0)
    for rank, record in enumerate(weights):
        own: dict[str, Tensor] = dict(ctx.baseline.spec.model(ctx.baseline.seed + rank).named_parameters())
        yield from compare_with_rank_0(ctx, rank, record, weights[0], own)
    if ctx.variant == BUFFERS:
        module = ctx.baseline.build_module()
        expected = dict(add_buffers(module, 0).named_buffers())
        for rank, record in enumerate(ctx.rank_records("buffers")):
            own = dict(add_buffers(module, rank).named_buffers())
            yield from compare_with_rank_0(ctx, rank, record, expected, own)
    local = ctx.compute_local_grads(step=0)
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=ctx.certify_exactness(range(1)))
    yield from judge_step(ctx, MOMENTUM_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "masters"))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def compare_with_rank_0(
    ctx: JudgeContext, rank: int, record: Tensors, expected: Tensors, own: Tensors
) -> Iterator[Comparison]:
    """Compare the tensors of ``rank`` with ``expected``; add a hint if a wrong tensor is that of the ``own`` model."""
    check_names("what a rank reports before training", expected, record)
    for name, tensor in expected.items():
        compared = compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), tensor.detach(), record[name])
        is_own = torch.equal(own[name].detach().to(record[name].dtype), record[name])
        yield add_hint(compared, f"it is that of rank {rank}'s own model") if is_own else compared


LAWS = (
    Law(
        name="parameters.initial_weights",
        statement="if ranks build different initial weights, all ranks start and train with those of rank 0",
        tier=Tier.STAGED,
        models=("odd_one",),
        observe=observe_initial_weights,
        judge=judge_initial_weights,
        features=(Feature.INITIAL_WEIGHTS,),
        variants=(Variant(), Variant(BUFFERS, (Feature.INITIAL_BUFFERS,))),
        kept_because="the only law whose ranks build different models",
    ),
)
