"""The law of several backwards before one step: of several losses, and in windows that the engine counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.double_backward import second_loss
from zharness.checks.optimizer_step import told
from zharness.checks.trial import Trial
from zharness.engines.protocol import AccumulationOwner, Reduction
from zharness.parity import Comparison, Part, identical
from zharness.workload import Batch

GIVEN_UP_WINDOWS = ((0, 1, 2), (3, 4, 5))  # of two micro-batches, each behind one that is given up


def observe_several_backwards(bench: Bench) -> None:
    """Two forwards, three losses, three backwards, one step."""
    if bench.variant:
        (observe_window if bench.variant == "window" else observe_given_up)(bench)
        return
    engine = bench.engine(optimizer=FROZEN)
    for step in range(2):
        batch = bench.batch(step)
        output = engine(batch.inputs)
        engine.backward(bench.spec.loss(output, batch.target), retain_graph=step == 1)
    engine.backward(second_loss(output))
    bench.record("grads", engine.full_grads())
    engine.step()
    engine.zero_grad()
    engine.backward(bench.loss(engine, 2))
    bench.record("grads", engine.full_grads(), 1)
    engine.close()


def observe_window(bench: Bench) -> None:
    """Two losses, and so two backwards, in each of the two micro-batches of an engine that counts them itself."""
    owner = AccumulationOwner.ENGINE
    engine = bench.engine(optimizer=FROZEN, accumulation_steps=2, accumulation_owner=owner, reduction=Reduction.MEAN)
    for step in range(2):
        batch = bench.batch(step)
        output = engine(batch.inputs)
        engine.backward(bench.spec.loss(output, batch.target), retain_graph=True)
        engine.backward(second_loss(output))
        if step == 1:
            bench.record("grads", engine.full_grads())
        engine.step()
        bench.record_state("state", engine, step)
    engine.close()


def observe_given_up(bench: Bench) -> None:
    """A window that is given up after its first micro-batch, and a whole one; twice."""
    owner = AccumulationOwner.ENGINE
    engine = bench.engine(optimizer=FROZEN, accumulation_steps=2, accumulation_owner=owner, reduction=Reduction.MEAN)
    for at, (given_up, first, last) in enumerate(GIVEN_UP_WINDOWS):
        engine.backward(bench.loss(engine, given_up))
        engine.step()
        engine.zero_grad()
        engine.backward(bench.loss(engine, first))
        engine.step()
        bench.record_state("state", engine, at)
        engine.backward(bench.loss(engine, last))
        bench.record("grads", engine.full_grads(), at)
        engine.step()
    engine.close()


def unmade(trial: Trial) -> Iterator[Comparison]:
    """The state recorded within the first window is that of an optimizer that has not stepped."""
    for rank, copy in enumerate(trial.copies("state")):
        for name, kept in copy.items():
            found = identical(trial.place(name, Part.OPTIMIZER, 0, rank), torch.zeros_like(kept), kept)
            yield told(found, "a step was made before the window was full")


def judge_given_up(trial: Trial) -> Iterator[Comparison]:
    """What zero_grad forgets counts for nothing: the window behind it has all of its micro-batches, and one step."""
    yield from unmade(trial)
    for at, (_, *steps) in enumerate(GIVEN_UP_WINDOWS):
        micros = [trial.locals(step) for step in steps]
        yield from trial.reduced("grads", micros, at, trial.exact(range(steps[0], steps[-1] + 1)))


def judge_window(trial: Trial) -> Iterator[Comparison]:
    """No step is made, and no momentum kept, before the second micro-batch."""
    yield from unmade(trial)
    losses = [trial.locals(step, objective=of) for step in range(2) for of in (None, second)]
    yield from trial.reduced("grads", losses, exact=trial.exact(range(2)) and trial.exact(range(2), second), scale=2)


def second(output: Tensor, _batch: Batch) -> Tensor:
    return second_loss(output)


def judge_several_backwards(trial: Trial) -> Iterator[Comparison]:
    if trial.variant:
        yield from (judge_window if trial.variant == "window" else judge_given_up)(trial)
        return
    losses = [trial.locals(0), trial.locals(1), trial.locals(1, objective=second)]
    exact = trial.exact(range(2)) and trial.exact(range(1, 2), second)
    yield from trial.reduced("grads", losses, exact=exact, scale=len(losses))
    yield from trial.reduced("grads", [trial.locals(2)], 1, trial.exact(range(2, 3)))
