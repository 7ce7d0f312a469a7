"""Define laws that scale the loss: by powers of two, and so that fp16 needs a loss scale to hold the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import OptimizerSpec
from zharness.law_kit.dtypes import LOSS_SCALES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import MODELS, variation_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.bounds import subnormal
from zharness.parity.certificate import single_term_mean_exactness
from zharness.workload.models import SAMPLES

LOSS_POWERS = (0, 3, -2)
# The gradients are about 2^-20. With this learning rate, fp32 can represent the changed weights of about 1.
LARGE_LR_SGD = OptimizerSpec(name="sgd", args={"lr": 2.0**16})
ROUNDED_HINT = "the gradient rounded to fp16 without the loss scale"


def observe_loss_scale_power(ctx: RankContext) -> None:
    """Run one backward for each power of two by which the loss is multiplied, and record the gradients."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for at, power in enumerate(LOSS_POWERS):
        loss = ctx.loss(engine, 0, f"loss-{at}")
        ctx.backward(engine, loss, 0, factor=2.0**power)
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_loss_scale_power(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare gradients bitwise with the power of two times those of the unscaled loss.

    If the order of summation may change from step to step, compare the gradients with the baseline within a bound.
    """
    yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads()], exact=ctx.certify_exactness(range(1)))
    for at, power in enumerate(LOSS_POWERS):
        # DDP rebuilds its buckets after the first backward, and adds in another order from then on.
        if not ctx.has_single_reduction_order():
            yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads()], at, scale=2.0**power)
            continue
        for rank, record in enumerate(ctx.rank_records("grads", at)):
            for name, grad in ctx.rank_records("grads")[0].items():
                yield compare_bitwise(
                    ctx.location(name, Part.REDUCTION, at, rank), grad.double() * 2.0**power, record[name]
                )


def find_small_factor(loss_scale: float, data_size: int) -> float:
    """Return the factor on the loss of ``exact`` that makes scaled gradients multiples of fp16's least number.

    One rank's gradients are integers divided by the number of samples. The same holds for their mean with zeros of the
    other ranks, if the number of ranks is a power of two. Without the loss scale, fp16 loses up to four of their bits.
    """
    return subnormal(torch.float16) * SAMPLES * data_size / loss_scale


def observe_small_gradients(ctx: RankContext) -> None:
    """Make a step whose gradients are too small for fp16 without the loss scale; only the last rank has a loss."""
    engine = ctx.build_engine(optimizer=LARGE_LR_SGD)
    ctx.record_training_state(engine, 0)
    factor = find_small_factor(LOSS_SCALES[ctx.config.dtype], ctx.data_size)
    has_loss = ctx.data_coordinate == ctx.data_size - 1
    ctx.backward(engine, ctx.loss(engine, 0), 0, factor=factor if has_loss else 0.0)
    ctx.record("grads", engine.full_grads())
    engine.step()
    engine.zero_grad()
    ctx.record_training_state(engine, 1)
    engine.close()


def judge_small_gradients(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients bitwise with those of the only rank that has a loss, and judge the step."""
    scale, last = ctx.baseline.loss_scale, ctx.data_size - 1
    factor = find_small_factor(scale, ctx.data_size)
    local = ctx.compute_local_grads(weigh=lambda loss, rank: loss * (factor if rank == last else 0.0))
    exact = single_term_mean_exactness(local[last], ctx.data_size, ctx.dtype, scale)
    halves = [LocalResult(one.loss, {name: grad.half().float() for name, grad in one.grads.items()}) for one in local]
    yield from ctx.compare_reduced_grads("grads", [local], exact=exact, suspects={ROUNDED_HINT: [halves]})
    yield from judge_step(ctx, LARGE_LR_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "masters"))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


LAWS = (
    variation_law(
        "loss_scale_power",
        "multiplying the loss by a power of two multiplies the gradients by the same power, bitwise",
        observe_loss_scale_power,
        judge_loss_scale_power,
        tier=Tier.EXACT,
        models=MODELS,
        dtypes=("fp32", "bf16"),  # in fp16 a gradient divided by four may underflow and lose bits
        steps=LawSteps(observe_loss_scale_power),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="needs neither baseline nor bound, so it can also judge kernels that are not torch's",
    ),
    variation_law(
        "small_gradients",
        "gradients that fp16 holds only under the loss scale are unscaled and applied without losing a bit",
        observe_small_gradients,
        judge_small_gradients,
        models=("exact",),
        dtypes=("fp16",),
        weights_stay_integers=False,
        kept_because="the only gradients below the smallest number of their weights' dtype",
    ),
)
