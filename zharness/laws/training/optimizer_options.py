"""Define the law training.optimizer_options: each option of torch's optimizers does what it does in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison

RATE = {"lr": 1e-2}

# One optimizer for each option, which is away from its default; no other law sets these.
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


def observe_optimizer_options(ctx: RankContext) -> None:
    """Train two steps with the optimizer that the law variant names."""
    engine = ctx.build_engine(optimizer=SPECS[ctx.variant])
    for step in range(STEPS):
        ctx.record_training_state(engine, step)
        engine.backward(ctx.loss(engine, step))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    ctx.record_training_state(engine, STEPS)
    engine.close()


def judge_optimizer_options(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each step with the optimizer's formula, applied to the engine's own numbers."""
    for step in range(STEPS):
        yield from judge_step(
            ctx, SPECS[ctx.variant], ctx.rank_records("grads", step)[0], RecordedStep(step, "masters")
        )
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))


LAWS = (
    variation_law(
        "optimizer_options",
        "an option of torch's optimizer that is away from its default does what it does in plain PyTorch",
        observe_optimizer_options,
        judge_optimizer_options,
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in SPECS),
        steps=LawSteps(observe_optimizer_options),
        kept_because="the only law that sets these options: an engine that builds the optimizer anew may drop one",
    ),
)
