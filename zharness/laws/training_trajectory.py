"""The law of the trajectory: every step of training, judged on its own from the engine's own numbers.

Free-running, two correct summation orders part by more than any bound within a few steps. So each step is teacher
forced: the baseline starts from the weights, and the replay from the weights, gradients and state, that the engine had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from zharness.engines.optimizers import param_groups
from zharness.engines.protocol import Absent, Engine, GroupSpec, Observations, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import (
    NO_CLIPPING,
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.training_run import TrainingRun
from zharness.laws.training_accumulation import judge_clip_factor
from zharness.parity import Comparison, Mismatch, Part, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.compare import check_names

STEPS = 3
STALE_FORWARD_HINT = "the forward used the weights from before"
NO_DECAY_GROUP = GroupSpec("*bias", {"weight_decay": 0.0, "lr": 2e-2})
SCHEDULE = (1.0, 0.5, 0.25)
ADAMW = OptimizerSpec(
    name="adamw",
    args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    groups=(NO_DECAY_GROUP,),
    schedule=SCHEDULE,
)
SGD = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01},
    groups=(NO_DECAY_GROUP,),
    schedule=SCHEDULE,
)
TRAJECTORY_OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}
TRAJECTORY_RUNS = {name: TrainingRun(spec, STEPS) for name, spec in TRAJECTORY_OPTIMIZERS.items()}
FIRST_LAYER_GROUP = GroupSpec("first.*", {"lr": 3e-2, "maximize": True})
# Of its own in all that Adam is told.
FIRST_LAYER_ADAM_GROUP = GroupSpec(
    "first.*", {**FIRST_LAYER_GROUP.overrides, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.2}
)
ADAM = OptimizerSpec(
    name="adam",
    args={"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    groups=(FIRST_LAYER_ADAM_GROUP, NO_DECAY_GROUP),
)
NESTEROV = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    groups=(FIRST_LAYER_GROUP, GroupSpec("*bias", {"nesterov": False, "dampening": 0.3, "momentum": 0.6})),
)


OPTIMIZER_RUNS = {
    "adam": TrainingRun(ADAM, 3),
    "nesterov": TrainingRun(NESTEROV, 3),
    "long": TrainingRun(ADAMW, 10, clip=0.5),
}

# The rest of torch's elementwise ones, whose state has other names, and other shapes than a parameter's.
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
    observe_training_run(ctx, TRAJECTORY_RUNS[ctx.variant])


def observe_optimizers(ctx: RankContext) -> None:
    if ctx.variant in OPTIMIZER_RUNS:
        observe_training_run(ctx, OPTIMIZER_RUNS[ctx.variant])
        return
    for spec in OTHER_OPTIMIZERS[ctx.variant]:
        engine, suffix = ctx.build_engine(optimizer=spec), f".{spec.name}"
        for step in range(OTHER_STEPS):
            ctx.record_training_state(engine, step, suffix)
            engine.backward(ctx.loss(engine, step, f"loss{suffix}"))
            ctx.record(f"grads{suffix}", engine.full_grads(), step)
            engine.step()
            engine.zero_grad()
        ctx.record_training_state(engine, OTHER_STEPS, suffix)
        engine.close()


def observe_training_run(ctx: RankContext, run: TrainingRun) -> None:
    """Gradients are forgotten between forward and backward, as many callers do it; and what the engine tells."""
    engine = ctx.build_engine(optimizer=run.optimizer, clip=run.clip)
    for step in range(run.steps):
        ctx.record_training_state(engine, step)
        loss = ctx.loss(engine, step)
        engine.zero_grad()
        engine.backward(loss)
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        norm = engine.grad_norm()
        ctx.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, step)
        ctx.record("told", collect_engine_facts(engine), step)
    ctx.record_training_state(engine, run.steps)
    engine.close()


def collect_engine_facts(engine: Engine) -> dict[str, Tensor]:
    """Learning rates, loss scale and skipped steps, as far as the engine tells them."""
    return build_facts(engine.observe())


def build_facts(observations: Observations) -> dict[str, Tensor]:
    """``told_by`` of an engine that says this of itself."""
    rates = () if isinstance(observations.learning_rates, Absent) else observations.learning_rates
    told = {learning_rate_fact(group): rate for group, rate in enumerate(rates)}
    facts = {LOSS_SCALE_FACT: observations.loss_scale, SKIPPED_STEPS_FACT: observations.skipped_steps}
    told |= {name: fact for name, fact in facts.items() if not isinstance(fact, Absent)}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in told.items()}


def compare_engine_facts(ctx: JudgeContext, spec: OptimizerSpec, step: int, steps_made: int) -> Iterator[Comparison]:
    """Every rank told the rates of the next step at ``step``, group by group, where ``made`` were and none skipped."""
    named = dict(ctx.baseline.spec.model(ctx.baseline.seed).named_parameters())
    factor = spec.schedule[min(steps_made, len(spec.schedule) - 1)]
    rates = [group.get("lr", spec.args["lr"]) * factor for group in param_groups(named, spec)]
    wanted = {learning_rate_fact(group): rate for group, rate in enumerate(rates)}
    wanted |= {LOSS_SCALE_FACT: ctx.baseline.loss_scale, SKIPPED_STEPS_FACT: 0}
    for rank, copy in enumerate(ctx.rank_records("told", step)):
        for name, value in copy.items():
            expected = torch.tensor(wanted.get(name, torch.nan), dtype=torch.float64)
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, step, rank), expected, value)


LOSS_SCALE_FACT, SKIPPED_STEPS_FACT = "loss scale", "skipped steps"


def learning_rate_fact(group: int) -> str:
    return f"learning rate of group {group}"


def judge_trajectory(ctx: JudgeContext) -> Iterator[Comparison]:
    yield from judge_training_run(ctx, TRAJECTORY_RUNS[ctx.variant])


def judge_optimizers(ctx: JudgeContext) -> Iterator[Comparison]:
    if ctx.variant in OPTIMIZER_RUNS:
        yield from judge_training_run(ctx, OPTIMIZER_RUNS[ctx.variant])
        return
    for spec in OTHER_OPTIMIZERS[ctx.variant]:
        for step in range(OTHER_STEPS):
            moment = RecordedStep(step, f"masters.{spec.name}", f"state.{spec.name}")
            yield from judge_step(ctx, spec, ctx.rank_records(f"grads.{spec.name}", step)[0], moment)
            yield from compare_ranks_after_step(ctx, replace(moment, step=step + 1))


def judge_training_run(ctx: JudgeContext, run: TrainingRun) -> Iterator[Comparison]:
    yield from compare_initial_weights(ctx)
    for step in range(run.steps):
        params = ctx.rank_records("params", step)[0]
        local = ctx.compute_local_grads(step, params)
        yield from compare_forward(ctx, step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step)
        grads, factor = ctx.rank_records("grads", step)[0], NO_CLIPPING
        if run.clip is not None:
            factor = yield from judge_clip_factor(ctx, "norm", step, grads, run.clip)
        yield from judge_step(ctx, run.optimizer, grads, RecordedStep(step, "masters"), factor)
        yield from compare_engine_facts(ctx, run.optimizer, step, step + 1)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


def compare_initial_weights(ctx: JudgeContext) -> Iterator[Comparison]:
    """The engine starts from the weights of the model that it was given."""
    wanted = dict(ctx.baseline.build_module().named_parameters())
    copy = ctx.rank_records("params", 0)[0]
    check_names("full_params", wanted, copy)
    for name, tensor in wanted.items():
        yield compare_bitwise(ctx.location(name, Part.GATHER), tensor.detach(), copy[name])


def compare_forward(
    ctx: JudgeContext, step: int, local: list[LocalResult], micro: int | None = None
) -> Iterator[Comparison]:
    """The engine's forward uses the weights that it reports; where it does not, perhaps the ones before the step.

    ``micro`` is the micro-batch, where it has not the number of the step.
    """
    at = step if micro is None else micro
    for comparison in ctx.compare_losses(at, local):
        if comparison.mismatch is None or step == 0:
            yield comparison
        else:
            yield replace(comparison, mismatch=blame_stale_weights(ctx, step, at, comparison.mismatch))


def blame_stale_weights(ctx: JudgeContext, step: int, micro: int, mismatch: Mismatch) -> Mismatch:
    """Blame the gather when the loss is the one that the weights before the last step give."""
    before = ctx.rank_records("params", step - 1)[0]
    stale = ctx.baseline.run_rank(mismatch.seen_on, micro, before).loss
    if float(stale) != mismatch.actual:
        return mismatch
    return replace(mismatch, part=Part.GATHER, hint=f"{STALE_FORWARD_HINT} step {step - 1}")
