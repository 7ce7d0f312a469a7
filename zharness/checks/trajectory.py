"""The law of the trajectory: every step of training, judged on its own from the engine's own numbers.

Free-running, two correct summation orders part by more than any bound within a few steps. So each step is teacher
forced: the baseline starts from the weights, and the replay from the weights, gradients and state, that the engine had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from zharness.checks.accumulation import clipped
from zharness.checks.bench import Bench
from zharness.checks.course import Course
from zharness.checks.optimizer_step import NO_CLIPPING, Moment, everyone_agrees, judge_step, published
from zharness.checks.trial import Trial
from zharness.engines.optimizers import param_groups
from zharness.engines.protocol import Absent, Engine, GroupSpec, Observations, OptimizerSpec
from zharness.parity import Comparison, Mismatch, Part, identical
from zharness.parity.baseline import Local
from zharness.parity.compare import check_names

STEPS = 3
STALE = "the forward used the weights from before"
NO_DECAY = GroupSpec("*bias", {"weight_decay": 0.0, "lr": 2e-2})
SCHEDULE = (1.0, 0.5, 0.25)
ADAMW = OptimizerSpec(
    name="adamw",
    args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    groups=(NO_DECAY,),
    schedule=SCHEDULE,
)
SGD = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01},
    groups=(NO_DECAY,),
    schedule=SCHEDULE,
)
TRAINED_BY = {"adamw": ADAMW, "sgd": SGD}
TRAJECTORIES = {name: Course(spec, STEPS) for name, spec in TRAINED_BY.items()}
FIRST = GroupSpec("first.*", {"lr": 3e-2, "maximize": True})
# Of its own in all that Adam is told.
APART = GroupSpec("first.*", {**FIRST.overrides, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.2})
ADAM = OptimizerSpec(
    name="adam",
    args={"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    groups=(APART, NO_DECAY),
)
NESTEROV = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    groups=(FIRST, GroupSpec("*bias", {"nesterov": False, "dampening": 0.3, "momentum": 0.6})),
)


COURSES = {"adam": Course(ADAM, 3), "nesterov": Course(NESTEROV, 3), "long": Course(ADAMW, 10, clip=0.5)}

# The rest of torch's elementwise ones, whose state has other names, and other shapes than a parameter's.
OTHERS = {
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


def observe_trajectory(bench: Bench) -> None:
    observe_course(bench, TRAJECTORIES[bench.variant])


def observe_optimizers(bench: Bench) -> None:
    if bench.variant in COURSES:
        observe_course(bench, COURSES[bench.variant])
        return
    for spec in OTHERS[bench.variant]:
        engine, suffix = bench.engine(optimizer=spec), f".{spec.name}"
        for step in range(OTHER_STEPS):
            bench.record_trained(engine, step, suffix)
            engine.backward(bench.loss(engine, step, f"loss{suffix}"))
            bench.record(f"grads{suffix}", engine.full_grads(), step)
            engine.step()
            engine.zero_grad()
        bench.record_trained(engine, OTHER_STEPS, suffix)
        engine.close()


def observe_course(bench: Bench, course: Course) -> None:
    """Gradients are forgotten between forward and backward, as many callers do it; and what the engine tells."""
    engine = bench.engine(optimizer=course.optimizer, clip=course.clip)
    for step in range(course.steps):
        bench.record_trained(engine, step)
        loss = bench.loss(engine, step)
        engine.zero_grad()
        engine.backward(loss)
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        norm = engine.grad_norm()
        bench.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, step)
        bench.record("told", told_by(engine), step)
    bench.record_trained(engine, course.steps)
    engine.close()


def told_by(engine: Engine) -> dict[str, Tensor]:
    """Learning rates, loss scale and skipped steps, as far as the engine tells them."""
    return facts_of(engine.observe())


def facts_of(seen: Observations) -> dict[str, Tensor]:
    """``told_by`` of an engine that says this of itself."""
    rates = () if isinstance(seen.learning_rates, Absent) else seen.learning_rates
    told = {rate_of(group): rate for group, rate in enumerate(rates)}
    facts = {SCALE: seen.loss_scale, SKIPPED: seen.skipped_steps}
    told |= {name: fact for name, fact in facts.items() if not isinstance(fact, Absent)}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in told.items()}


def facts_told(trial: Trial, spec: OptimizerSpec, step: int, made: int) -> Iterator[Comparison]:
    """Every rank told the rates of the next step at ``step``, group by group, where ``made`` were and none skipped."""
    named = dict(trial.baseline.spec.model(trial.baseline.seed).named_parameters())
    factor = spec.schedule[min(made, len(spec.schedule) - 1)]
    rates = [group.get("lr", spec.args["lr"]) * factor for group in param_groups(named, spec)]
    wanted = {rate_of(group): rate for group, rate in enumerate(rates)}
    wanted |= {SCALE: trial.baseline.loss_scale, SKIPPED: 0}
    for rank, copy in enumerate(trial.copies("told", step)):
        for name, value in copy.items():
            expected = torch.tensor(wanted.get(name, torch.nan), dtype=torch.float64)
            yield identical(trial.place(name, Part.OPTIMIZER, step, rank), expected, value)


SCALE, SKIPPED = "loss scale", "skipped steps"


def rate_of(group: int) -> str:
    return f"learning rate of group {group}"


def judge_trajectory(trial: Trial) -> Iterator[Comparison]:
    yield from judge_course(trial, TRAJECTORIES[trial.variant])


def judge_optimizers(trial: Trial) -> Iterator[Comparison]:
    if trial.variant in COURSES:
        yield from judge_course(trial, COURSES[trial.variant])
        return
    for spec in OTHERS[trial.variant]:
        for step in range(OTHER_STEPS):
            moment = Moment(step, f"masters.{spec.name}", f"state.{spec.name}")
            yield from judge_step(trial, spec, trial.copies(f"grads.{spec.name}", step)[0], moment)
            yield from everyone_agrees(trial, replace(moment, step=step + 1))


def judge_course(trial: Trial, course: Course) -> Iterator[Comparison]:
    yield from initial_weights(trial)
    for step in range(course.steps):
        params = trial.copies("params", step)[0]
        local = trial.locals(step, params)
        yield from forward(trial, step, local)
        yield from trial.reduced("grads", [local], step)
        grads, factor = trial.copies("grads", step)[0], NO_CLIPPING
        if course.clip is not None:
            factor = yield from clipped(trial, "norm", step, grads, course.clip)
        yield from judge_step(trial, course.optimizer, grads, Moment(step, "masters"), factor)
        yield from facts_told(trial, course.optimizer, step, step + 1)
        yield from everyone_agrees(trial, Moment(step + 1))
        yield from published(trial, Moment(step + 1, "masters"), "params")


def initial_weights(trial: Trial) -> Iterator[Comparison]:
    """The engine starts from the weights of the model that it was given."""
    wanted = dict(trial.baseline.module().named_parameters())
    copy = trial.copies("params", 0)[0]
    check_names("full_params", wanted, copy)
    for name, tensor in wanted.items():
        yield identical(trial.place(name, Part.GATHER), tensor.detach(), copy[name])


def forward(trial: Trial, step: int, local: list[Local], micro: int | None = None) -> Iterator[Comparison]:
    """The engine's forward uses the weights that it reports; where it does not, perhaps the ones before the step.

    ``micro`` is the micro-batch, where it has not the number of the step.
    """
    at = step if micro is None else micro
    for comparison in trial.same_loss(at, local):
        if comparison.mismatch is None or step == 0:
            yield comparison
        else:
            yield replace(comparison, mismatch=as_stale(trial, step, at, comparison.mismatch))


def as_stale(trial: Trial, step: int, micro: int, mismatch: Mismatch) -> Mismatch:
    """Blame the gather when the loss is the one that the weights before the last step give."""
    before = trial.copies("params", step - 1)[0]
    stale = trial.baseline.local(mismatch.seen_on, micro, before).loss
    if float(stale) != mismatch.actual:
        return mismatch
    return replace(mismatch, part=Part.GATHER, hint=f"{STALE} step {step - 1}")
