"""The law of the trajectory: every step of training, judged on its own from the engine's own numbers.

Free-running, two correct summation orders part by more than any bound within a few steps. So each step is teacher
forced: the baseline starts from the weights, and the replay from the weights, gradients and state, that the engine had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zharness.checks.bench import Bench
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step, published
from zharness.checks.trial import Trial
from zharness.engines.protocol import GroupSpec, OptimizerSpec
from zharness.parity import Comparison, Mismatch, Part, identical
from zharness.parity.baseline import Local
from zharness.parity.compare import check_names

STEPS = 3
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
OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}


def observe_trajectory(bench: Bench) -> None:
    engine = bench.engine(optimizer=OPTIMIZERS[bench.variant])
    for step in range(STEPS):
        bench.record_weights(engine, step)
        bench.record_state("state", engine, step)
        engine.backward(bench.loss(engine, step))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    bench.record_weights(engine, STEPS)
    bench.record_state("state", engine, STEPS)
    engine.close()


def judge_trajectory(trial: Trial) -> Iterator[Comparison]:
    yield from initial_weights(trial)
    for step in range(STEPS):
        params = trial.copies("params", step)[0]
        local = trial.locals(step, params)
        yield from forward(trial, step, local)
        yield from trial.reduced("grads", [local], step)
        moment = Moment(step, "masters")
        yield from judge_step(trial, OPTIMIZERS[trial.variant], trial.copies("grads", step)[0], moment)
        yield from everyone_agrees(trial, Moment(step + 1))
        yield from published(trial, Moment(step + 1, "masters"), "params")


def initial_weights(trial: Trial) -> Iterator[Comparison]:
    """The engine starts from the weights of the model that it was given."""
    wanted = dict(trial.baseline.module().named_parameters())
    copy = trial.copies("params", 0)[0]
    check_names("full_params", wanted, copy)
    for name, tensor in wanted.items():
        yield identical(trial.place(name, Part.GATHER), tensor.detach(), copy[name])


def forward(trial: Trial, step: int, local: list[Local]) -> Iterator[Comparison]:
    """The engine's forward uses the weights that it reports; where it does not, perhaps the ones before the step."""
    for comparison in trial.same_loss(step, local):
        if comparison.mismatch is None or step == 0:
            yield comparison
        else:
            yield replace(comparison, mismatch=as_stale(trial, step, comparison.mismatch))


def as_stale(trial: Trial, step: int, mismatch: Mismatch) -> Mismatch:
    """Blame the gather when the loss is the one that the weights before the last step give."""
    before = trial.copies("params", step - 1)[0]
    stale = trial.baseline.local(mismatch.seen_on, step, before).loss
    if float(stale) != mismatch.actual:
        return mismatch
    return replace(mismatch, part=Part.GATHER, hint=f"the forward used the weights from before step {step - 1}")
