"""Define the law training.loss_scale_power: a loss times a power of two gives gradients times the same power."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import MODELS, variation_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise

LOSS_POWERS = (0, 3, -2)


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
        # DDP rebuilds its buckets after the first backward, and then adds in another order.
        if not ctx.has_single_reduction_order():
            yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads()], at, scale=2.0**power)
            continue
        for rank, record in enumerate(ctx.rank_records("grads", at)):
            for name, grad in ctx.rank_records("grads")[0].items():
                yield compare_bitwise(
                    ctx.location(name, Part.REDUCTION, at, rank), grad.double() * 2.0**power, record[name]
                )


LAWS = (
    variation_law(
        "loss_scale_power",
        "a loss times a power of two gives gradients times that power, bitwise",
        observe_loss_scale_power,
        judge_loss_scale_power,
        tier=Tier.EXACT,
        models=MODELS,
        dtypes=("fp32", "bf16"),  # in fp16 a gradient divided by four may underflow and lose bits
        steps=LawSteps(observe_loss_scale_power),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="needs neither baseline nor bound, so it can also judge kernels that are not torch's",
    ),
)
