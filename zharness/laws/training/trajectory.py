"""Define the laws of optimizer steps: each step equals torch.optim's formula, applied to the engine's numbers.

Two correct orders of summation drift apart by more than any bound within a few steps. So each step is judged alone, by
teacher forcing: the baseline starts from the engine's weights, and the optimizer's formula starts from the engine's
weights, gradients and state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zharness.engines.protocol import Feature, OptimizerSpec
from zharness.law_kit.clipping import NO_CLIPPING, judge_clip_factor
from zharness.law_kit.engine_facts import collect_engine_facts, compare_engine_facts
from zharness.law_kit.hints import hint_added_gradient
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import ADAM, ADAMW, NESTEROV, TRAJECTORY_OPTIMIZERS
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_forward, compare_initial_weights
from zharness.law_kit.setting import SettingSupport
from zharness.law_kit.split_sums import compare_split_grads, splits_sums
from zharness.law_kit.training_run import TrainingRun
from zharness.laws.training.common import ALL_MODELS
from zharness.parity import Comparison, Tier
from zharness.parity.baseline import LocalResult

TRAJECTORY_LAW = "training.trajectory"  # scripts that run a random program of verbs name this law too

STEPS = 3

TRAJECTORY_RUNS = {name: TrainingRun(spec, STEPS) for name, spec in TRAJECTORY_OPTIMIZERS.items()}

OPTIMIZER_RUNS = {
    "adam": TrainingRun(ADAM, 3),
    "nesterov": TrainingRun(NESTEROV, 3),
    "long": TrainingRun(ADAMW, 10, clip=0.5),
}

# torch's other elementwise optimizers, whose state has other names and shapes.
OTHER_OPTIMIZERS = {
    "others": (
        OptimizerSpec("adadelta", {"lr": 1.0, "weight_decay": 0.1}),
        OptimizerSpec("adagrad", {"lr": 1e-2, "lr_decay": 0.1}),
        OptimizerSpec("adamax", {"lr": 1e-2}),
        OptimizerSpec("asgd", {"lr": 1e-2, "lambd": 0.1, "t0": 1.0}),
        OptimizerSpec("nadam", {"lr": 1e-2}),
        OptimizerSpec("radam", {"lr": 1e-2, "betas": (0.9, 0.8)}),
        OptimizerSpec("rmsprop", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    ),
    "rprop": (OptimizerSpec("rprop", {"lr": 1e-2}),),
}

OTHER_STEPS = 2


def observe_trajectory(ctx: RankContext) -> None:
    """Train several steps with the optimizer that the law variant names."""
    observe_training_run(ctx, TRAJECTORY_RUNS[ctx.variant])


def observe_optimizers(ctx: RankContext) -> None:
    """Train with the optimizer that the law variant names, or with one engine for each of its optimizers."""
    if ctx.variant in OPTIMIZER_RUNS:
        observe_training_run(ctx, OPTIMIZER_RUNS[ctx.variant])
        return
    for spec in OTHER_OPTIMIZERS[ctx.variant]:
        engine, suffix = ctx.build_engine(optimizer=spec), f".{spec.name}"
        for step in range(OTHER_STEPS):
            ctx.record_training_state(engine, step, suffix)
            ctx.train(engine, step, f"loss{suffix}")
            ctx.record(f"grads{suffix}", engine.full_grads(), step)
            engine.step()
            engine.zero_grad()
        ctx.record_training_state(engine, OTHER_STEPS, suffix)
        engine.close()


def observe_training_run(ctx: RankContext, run: TrainingRun) -> None:
    """Train several steps, with zero_grad between forward and backward, and record what the engine reports.

    Many training loops call zero_grad at this point.
    """
    engine = ctx.build_engine(optimizer=run.optimizer, clip=run.clip)
    for step in range(run.steps):
        ctx.record_training_state(engine, step)
        loss = ctx.loss(engine, step)
        engine.zero_grad()
        ctx.backward(engine, loss, step)
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        norm = engine.grad_norm()
        ctx.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, step)
        ctx.record("facts", collect_engine_facts(engine), step)
    ctx.record_training_state(engine, run.steps)
    engine.close()


def judge_trajectory(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge every step of the training that the law variant names."""
    yield from judge_training_run(ctx, TRAJECTORY_RUNS[ctx.variant])


def judge_optimizers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge every step of the training, which uses the law variant's optimizer or each of its optimizers in turn."""
    if ctx.variant in OPTIMIZER_RUNS:
        yield from judge_training_run(ctx, OPTIMIZER_RUNS[ctx.variant])
        return
    for spec in OTHER_OPTIMIZERS[ctx.variant]:
        for step in range(OTHER_STEPS):
            before = RecordedStep(step, f"masters.{spec.name}", f"state.{spec.name}")
            yield from judge_step(ctx, spec, ctx.rank_records(f"grads.{spec.name}", step)[0], before)
            yield from compare_ranks_after_step(ctx, replace(before, step=step + 1))


def hint_old_gradient(ctx: JudgeContext, comparison: Comparison, step: int, local: Sequence[LocalResult]) -> Comparison:
    """Add a hint to a mismatch of a gradient if the gradient of the previous step was added to it."""
    if comparison.mismatch is None or not step:
        return comparison
    old, grads = (ctx.rank_records("grads", at)[0] for at in (step - 1, step))
    name = comparison.mismatch.parameter
    dtype = grads[name].dtype if name in grads else ctx.dtype
    return hint_added_gradient(
        comparison, grads, old, [result.grads for result in local], ctx.get_reduce_dtype(name, dtype)
    )


def compare_gradients(ctx: JudgeContext, step: int, params: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Compare the losses and gradients of a step with those of plain PyTorch at the engine's weights ``params``.

    On tp, only gradients are compared, because the engine rounds parts of the loss.
    """
    if splits_sums(ctx):
        yield from compare_split_grads(ctx, "grads", step, params)
        return
    local = ctx.compute_local_grads(step, params)
    yield from compare_forward(ctx, step, local)
    for comparison in ctx.compare_reduced_grads("grads", [local], step):
        yield hint_old_gradient(ctx, comparison, step, local)


def judge_training_run(ctx: JudgeContext, run: TrainingRun) -> Iterator[Comparison]:
    """Judge each step, starting from the engine's weights, gradients and optimizer state."""
    yield from compare_initial_weights(ctx)
    for step in range(run.steps):
        yield from compare_gradients(ctx, step, ctx.rank_records("params", step)[0])
        grads, factor = ctx.rank_records("grads", step)[0], NO_CLIPPING
        if run.clip is not None:
            factor = yield from judge_clip_factor(ctx, "norm", step, grads, run.clip)
        yield from judge_step(ctx, run.optimizer, grads, RecordedStep(step, "masters"), factor)
        yield from compare_engine_facts(ctx, run.optimizer, step, step + 1)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


LAWS = (
    Law(
        name=TRAJECTORY_LAW,
        statement="each of several steps equals torch.optim's formula applied to the engine's own numbers",
        tier=Tier.STAGED,
        models=ALL_MODELS,
        observe=observe_trajectory,
        judge=judge_trajectory,
        features=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=tuple(Variant(name, training_run=run) for name, run in TRAJECTORY_RUNS.items()),
        steps=LawSteps(observe_trajectory),
        covers_triples=True,
        mesh_dtypes=("bf16",),
        judges_split_sums=True,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="makes several steps with parameter groups, momentum and a schedule; other laws make one step",
    ),
    Law(
        name="training.optimizers",
        statement="steps of other optimizers with other options, and ten clipped steps, equal torch.optim's formulas",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_optimizers,
        judge=judge_optimizers,
        features=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(
            Variant("adam", training_run=OPTIMIZER_RUNS["adam"]),
            Variant("nesterov", training_run=OPTIMIZER_RUNS["nesterov"]),
            Variant("long", (Feature.CLIP,), training_run=OPTIMIZER_RUNS["long"]),
            Variant("others", compares_engine_with_itself=True),
            Variant("rprop", compares_engine_with_itself=True),
        ),
        steps=LawSteps(observe_optimizers),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        judges_split_sums=True,
        kept_because="the only law with optimizers and options beyond the default ones",
    ),
)
