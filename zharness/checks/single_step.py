"""The law of a single step: what moves, where it lies, and what is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.construction import is_dtensor
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.switches import left_alone, switches
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, OptimizerSpec, Piece
from zharness.parity import Comparison, Part, identical

SGD = OptimizerSpec(name="sgd", args={"lr": 1.0})
EVALUATED = 2  # the micro-batch of a forward that trains nothing


def trained_step(bench: Bench, engine: Engine, step: int = 0) -> None:
    """One step, with everything recorded that ``judge_step`` asks for."""
    bench.record_trained(engine, step)
    engine.backward(bench.loss(engine, step))
    bench.record("grads", engine.full_grads(), step)
    engine.step()
    engine.zero_grad()
    bench.record_trained(engine, step + 1)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    engine.module.eval()
    try:
        yield
    finally:
        engine.module.train()


def observe_sgd_step(bench: Bench) -> None:
    """A step on ranks whose generators differ, as a user seeds them; and what a rank holds before and after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(bench.rank)
        bench.record("switches", switches(), 0)
        engine = bench.engine(optimizer=SGD)
        bench.record("switches", switches(), 1)
        bench.record("held", held(engine), 0)
        with evaluating(engine), torch.no_grad():
            bench.loss(engine, EVALUATED)
        bench.record("switches", switches(), 2)
        trained_step(bench, engine)
        bench.record("held", held(engine), 1)
        bench.record("switches", switches(), 3)
        engine.close()
        bench.record("switches", switches(), 4)


def held(engine: Engine) -> dict[str, Tensor]:
    """What this rank's module holds, flat, of each parameter that is a shard: a DTensor, or one in a single dimension.

    The latter where the whole one has others. What holds nothing at all is kept elsewhere, and not looked at.
    """
    wholes = engine.full_params()
    named: dict[str, Any] = {name: p for name, p in engine.module.named_parameters() if name in wholes}
    shards = {name: p.to_local() if is_dtensor(p) else p for name, p in named.items()}
    return {
        name: shard.detach().flatten()
        for name, shard in shards.items()
        if is_dtensor(named[name]) or (shard.numel() and shard.shape != wholes[name].shape)
    }


def judge_sgd_step(trial: Trial) -> Iterator[Comparison]:
    yield from judge_step(trial, SGD, trial.copies("grads")[0], Moment(0, "masters"))
    yield from everyone_agrees(trial, Moment(1))
    yield from left_alone(trial, "switches", range(5))
    yield from dealt_out(trial)
    for step in range(2):
        yield from owned(trial, step)


def dealt_out(trial: Trial) -> Iterator[Comparison]:
    """Where the layout cuts a parameter into pieces, every element is in one of them, and ranks tell the same."""
    for name, weight in trial.copies("masters")[0].items():
        layouts = [evidence.layout.get(name, ()) for evidence in trial.evidence]
        for rank, pieces in enumerate(layouts):
            place = trial.place(name, Part.GATHER, 0, rank)
            yield identical(place, torch.tensor(1.0), torch.tensor(float(pieces == layouts[0])))
            if pieces:
                times = torch.zeros(weight.numel())
                for piece in pieces:
                    times[piece.start : piece.stop] += 1
                yield identical(place, torch.ones_like(times), times)


def owned(trial: Trial, step: int) -> Iterator[Comparison]:
    """Each rank's part of a sharded weight is the elements of it that the engine's layout gives to this rank.

    Behind them may be padding, less than one element for each rank.
    """
    weights = trial.copies("masters", step)[0]
    for rank, copy in enumerate(trial.copies("held", step)):
        for name, part in copy.items():
            pieces = trial.evidence[rank].layout.get(name, (Piece(rank, 0, weights[name].numel()),))
            mine = [weights[name].flatten()[piece.start : piece.stop] for piece in pieces if piece.rank == rank]
            told = torch.cat([weights[name].new_empty(0), *mine])
            place = trial.place(name, Part.GATHER, step, rank)
            count = torch.tensor(float(part.numel()))
            yield identical(place, count.clamp(told.numel(), told.numel() + trial.world_size - 1), count)
            if part.numel() >= told.numel():
                yield identical(place, told.to(part.dtype), part[: told.numel()])
