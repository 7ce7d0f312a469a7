"""Define the law training.optimizer_options: each option of torch's optimizers works as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from zharness.engines.protocol import Feature, GroupSpec, OptimizerSpec
from zharness.law_kit.clipped_step import hint_other_norm
from zharness.law_kit.clipping import NO_CLIPPING, judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison

RATE = {"lr": 1e-2}

# One optimizer for each option, which has a value other than its default. No other law sets these options.
SPECS = {
    "sgd_maximize": OptimizerSpec("sgd", {**RATE, "momentum": 0.5, "maximize": True}),
    "sgd_foreach": OptimizerSpec("sgd", {**RATE, "momentum": 0.5, "foreach": True}),
    "adamw_single": OptimizerSpec("adamw", {**RATE, "foreach": False}),
    "adamw_fused": OptimizerSpec("adamw", {**RATE, "fused": True}),
    "adamw_amsgrad": OptimizerSpec("adamw", {**RATE, "amsgrad": True, "maximize": True}),
    "adamw_rate_0": OptimizerSpec("adamw", {"lr": 0.0, "weight_decay": 0.1}),
    "adam_decoupled": OptimizerSpec("adam", {**RATE, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop_centered": OptimizerSpec("rmsprop", {**RATE, "centered": True, "weight_decay": 0.1}),
    "adagrad_eps": OptimizerSpec("adagrad", {**RATE, "eps": 1e-3, "maximize": True}),
    "nadam_decoupled": OptimizerSpec("nadam", {**RATE, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam_decoupled": OptimizerSpec("radam", {**RATE, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax_decay": OptimizerSpec("adamax", {**RATE, "weight_decay": 0.1, "maximize": True}),
}

STEPS = 2


@dataclass(frozen=True)
class OptionRun:
    """A training with one option, or with two options that an engine may confuse.

    The loss of step ``zero_loss_step`` is multiplied by zero, and the first layer is frozen in step ``frozen_step``.
    """

    optimizer: OptimizerSpec
    steps: int = STEPS
    clip: float | None = None
    zero_loss_step: int | None = None
    frozen_step: int | None = None


DECAYING_SGD = {**RATE, "momentum": 0.5, "weight_decay": 0.1}
POWER_OF_TWO = {"lr": 2.0**-6}
DOUBLE_RATE = GroupSpec("*bias", {"lr": 2.0**-5})  # schedules must not mix up the groups' learning rates
CLIP = 1e-2  # far below the norm of the gradients, so that it clips

# The schedules of DeepSpeed's schedulers, with steps after the end of each schedule. All rates are exact.
SCHEDULES: Mapping[str, tuple[float, ...]] = {
    "sgd_warm_up": (0.0, 0.0, 0.5, 1.0),
    "sgd_warm_up_shortest": (0.0, 0.0, 1.0, 1.0),
    "sgd_warm_up_decay": (0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0),
    "sgd_warm_up_cosine": (0.0, 0.0, 0.5, 0.5, 0.0, 0.0),
    "sgd_range_test": (1.0, 1.5, 2.0, 2.5),
    "sgd_range_test_stairs": (1.0, 1.0, 2.0, 2.0, 3.0),
    "sgd_one_cycle": (1.0, 2.5, 4.0, 2.5, 1.0, 0.5),
    "sgd_one_cycle_stairs": (1.0, 1.0, 4.0, 1.0, 1.0),
}

ONE_GROUP = "sgd_one_cycle_stairs"  # with several groups, OneCycle's failure on a list of rates would hide wrong stairs

# Features in addition to those that every run needs.
FEATURES: Mapping[str, tuple[Feature, ...]] = {
    "sgd_rate_rises_from_0": (Feature.SCHEDULE,),
    **dict.fromkeys(SCHEDULES, (Feature.SCHEDULE, Feature.PARAM_GROUPS)),
    "sgd_decay_clipped": (Feature.CLIP,),
    "adamw_group_of_one": (Feature.PARAM_GROUPS,),
    "adamw_group_of_rate_0": (Feature.PARAM_GROUPS,),
    "sgd_zero_loss": (Feature.SCHEDULE, Feature.CLIP),
    "sgd_frozen": (Feature.UNFREEZING,),
}

RUNS: Mapping[str, OptionRun] = {
    **{name: OptionRun(spec) for name, spec in SPECS.items()},
    "sgd_rate_rises_from_0": OptionRun(OptimizerSpec("sgd", {**RATE, "momentum": 0.5}, schedule=(0.0, 0.5, 1.0)), 3),
    **{
        name: OptionRun(
            OptimizerSpec("sgd", POWER_OF_TWO, () if name == ONE_GROUP else (DOUBLE_RATE,), schedule), len(schedule)
        )
        for name, schedule in SCHEDULES.items()
    },
    "sgd_decay_clipped": OptionRun(OptimizerSpec("sgd", DECAYING_SGD), clip=CLIP),
    "adamw_group_of_one": OptionRun(
        OptimizerSpec("adamw", {**RATE, "weight_decay": 0.1}, (GroupSpec("first.weight", {"weight_decay": 0.2}),)),
    ),
    "adamw_group_of_rate_0": OptionRun(
        OptimizerSpec("adamw", {**RATE, "weight_decay": 0.1}, (GroupSpec("*bias", {"lr": 0.0}),)),
    ),
    "sgd_zero_loss": OptionRun(
        OptimizerSpec("sgd", DECAYING_SGD, schedule=(1.0, 0.5, 0.25)),
        3,
        clip=CLIP,
        zero_loss_step=1,
    ),
    "sgd_frozen": OptionRun(OptimizerSpec("sgd", DECAYING_SGD), 3, frozen_step=1),
}


def observe_optimizer_options(ctx: RankContext) -> None:
    """Train several steps with the options that the law variant names."""
    run = RUNS[ctx.variant]
    engine = ctx.build_engine(optimizer=run.optimizer, clip=run.clip)
    for step in range(run.steps):
        ctx.record_training_state(engine, step)
        if step == run.frozen_step:
            engine.module.get_submodule("first").requires_grad_(False)
        engine.backward(ctx.loss(engine, step) * float(step != run.zero_loss_step))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        if run.clip is not None:
            norm = engine.grad_norm()
            ctx.record("norm", {} if norm is None else {"norm": scalar(norm)}, step)
        engine.zero_grad()
        if step == run.frozen_step:  # an engine may not let optimizer state of frozen weights be read
            engine.module.get_submodule("first").requires_grad_(True)
    ctx.record_training_state(engine, run.steps)
    engine.close()


def judge_optimizer_options(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each step with the optimizer's formula, applied to the engine's own numbers."""
    run = RUNS[ctx.variant]
    for step in range(run.steps):
        grads, factor = ctx.rank_records("grads", step)[0], NO_CLIPPING
        if run.clip is not None:
            factor = yield from judge_clip_factor(ctx, "norm", step, grads, run.clip)
        judge = partial(judge_step, ctx, run.optimizer, grads, RecordedStep(step, "masters"))
        for comparison in judge(factor):
            yield comparison if run.clip is None else hint_other_norm(ctx, comparison, grads, run.clip, judge)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))


LAWS = (
    variation_law(
        "optimizer_options",
        "an option of torch's optimizer with a value other than its default has the same effect as in plain PyTorch",
        observe_optimizer_options,
        judge_optimizer_options,
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=tuple(
            Variant(name, FEATURES.get(name, ()), compares_engine_with_itself=True, optimizer=run.optimizer)
            for name, run in RUNS.items()
        ),
        steps=LawSteps(observe_optimizer_options),
        kept_because="the only law that sets these options: an engine that rebuilds the optimizer may drop an option",
    ),
)
