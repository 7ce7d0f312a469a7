"""Define the laws of invariance: all ranks have equal state, and engine variants do not change any number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.options import are_options_compatible
from zharness.engines.protocol import Absent, Engine, Feature
from zharness.law_kit.buffers import compare_buffers, read_buffers, read_initial_buffers
from zharness.law_kit.integer_steps import UNIT_SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import PLAIN_ADAMW, UNIT_LR_SGD
from zharness.law_kit.pairwise import build_pairwise_rows
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_record_of_ranks
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import STEPS, variation_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise


def observe_ranks_agree(ctx: RankContext) -> None:
    """Train several steps, and record weights, state, buffers, norm, loss scale and skipped steps after each step."""
    own_kernels = ctx.config.stage in ctx.capabilities.own_kernels
    ctx.record("kernels", {"own": torch.tensor(own_kernels and not ctx.spec.exact)})
    engine = ctx.build_engine(optimizer=UNIT_SIGN_STEPS if ctx.spec.exact else PLAIN_ADAMW, clip=1.0)
    for step in range(STEPS):
        ctx.train(engine, step)
        engine.step()
        engine.zero_grad()
        ctx.record("params", engine.full_params(), step)
        ctx.record_optimizer_state("state", engine, step)
        ctx.record("buffers", dict(engine.module.named_buffers()), step)
        ctx.record("facts", collect_engine_numbers(engine), step)
    engine.close()


def collect_engine_numbers(engine: Engine) -> dict[str, Tensor]:
    """Return the norm, loss scale and number of skipped steps that the engine reports.

    Values that the engine does not report are left out.
    """
    observations = engine.observe()
    numbers = {
        "norm": engine.grad_norm(),
        "loss scale": observations.loss_scale,
        "skipped steps": observations.skipped_steps,
    }
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in numbers.items()
        if value is not None and not isinstance(value, Absent)
    }


def judge_ranks_agree(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that every recorded tensor is equal on all ranks, and that buffers are as the engine promises."""
    own_kernels = bool(ctx.rank_records("kernels")[0]["own"])
    buffers, params = read_initial_buffers(ctx), None
    for step in range(STEPS):
        for label in ("params", "state", "facts"):
            for name, tensor in ctx.rank_records(label, step)[0].items():
                yield compare_bitwise(ctx.location(name, Part.GATHER, step), tensor, tensor)
            yield from compare_record_of_ranks(ctx, label, step, step)
        if any(buffers):
            yield from compare_buffers(ctx, step, params, buffers, own_kernels)
        buffers = read_buffers(ctx, step)
        params = ctx.rank_records("params", step)[0]


def observe_config_invariance(ctx: RankContext) -> None:
    """Make one step without further options, and one step for each combination of engine variants.

    Variants that contradict the options of the cell are left out.
    """
    variants = {
        name: options
        for name, options in ctx.capabilities.neutral_options.items()
        if are_options_compatible(ctx.config.options, options)
    }
    for row, options in enumerate([{}, *build_pairwise_rows(variants, ctx.capabilities.neutral_exclusions)]):
        engine = ctx.build_engine(optimizer=UNIT_LR_SGD, options=options)
        batch = ctx.batch(0)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        ctx.record("grads", engine.full_grads(), row)
        engine.step()
        ctx.record("params", engine.full_params(), row)
        engine.close()


def judge_config_invariance(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare gradients with those of plain PyTorch, and with those of the engine without options.

    The second comparison is bitwise, and is made only if every order of summation gives the same result.
    """
    local = ctx.compute_local_grads()
    for row in (snapshot.step for snapshot in ctx.evidence[0].snapshots if snapshot.label == "grads"):
        yield from ctx.compare_reduced_grads("grads", [local], row, ctx.certify_exactness(range(1)))
        for label, part in (("grads", Part.REDUCTION), ("params", Part.OPTIMIZER)) * ctx.has_single_reduction_order():
            first = ctx.rank_records(label)[0]
            for rank, record in enumerate(ctx.rank_records(label, row)):
                for name, tensor in first.items():
                    yield compare_bitwise(ctx.location(name, part, row, rank), tensor, record[name])


LAWS = (
    variation_law(
        "ranks_agree",
        "weights, optimizer state, norm and counts are equal on all ranks after every step; buffers are as promised",
        observe_ranks_agree,
        judge_ranks_agree,
        tier=Tier.EXACT,
        features=(Feature.CLIP,),
        weights_stay_integers=False,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        variants=(Variant(compares_engine_with_itself=True, model_scope=ModelScope.ANY),),
        kept_because="needs no baseline: it holds for a model that no other law can run",
    ),
    variation_law(
        "buffers",
        "after every step, each rank's running statistics are those that the engine promises",
        observe_ranks_agree,
        judge_ranks_agree,
        tier=Tier.EXACT,
        models=("stateful",),
        features=(Feature.CLIP,),
        weights_stay_integers=False,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        # A low-precision batch norm with fp32 statistics does not run on a CPU.
        dtypes=("fp32",),
        variants=(Variant(compares_engine_with_itself=True),),
        kept_because="the only law that judges running statistics after each step, also in accumulation windows",
    ),
    variation_law(
        "config_invariance",
        "engine variants, alone and in compatible pairs, do not change any result",
        observe_config_invariance,
        judge_config_invariance,
        features=(Feature.VARIANTS,),
        models=("mlp", "exact"),
        steps=LawSteps(observe_config_invariance),
        kept_because="the only law that compares results of different engine options",
    ),
)
