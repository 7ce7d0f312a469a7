"""A part of the law of masters: gradients of several backwards, reduced one by one, add up in the dtype asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from zharness.checks.autocast import LOW
from zharness.checks.bench import Bench
from zharness.checks.trial import Trial
from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.parity import Comparison
from zharness.parity.baseline import Weigh
from zharness.parity.certificate import division_by

ADDED_WIDE: Mapping[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
# Each share is a number of bf16, and 257 shares together need nine bits more than one: fp32 has them, bf16 has not.
SHARES = (256.0, 1.0)


def refused(bench: Bench, options: Mapping[str, Any]) -> bool:
    """Whether an engine of these options is refused."""
    try:
        bench.engine(options=options).close()
    except UsageError:
        return True
    return False


def share(factor: float) -> Weigh:
    """So many times the loss of rank 0, and nothing of every other's: no reduction over ranks then rounds."""
    return lambda loss, rank: loss * (factor * (rank == 0))


def observe_wide_sums(bench: Bench) -> None:
    """Two backwards on bf16 weights; nothing where the engine refuses to add their gradients up in fp32.

    Plain PyTorch adds up in the dtype of the weights, and an engine may: it is held to fp32 where it takes that key.
    """
    if bench.capabilities.refusal(Feature.CALLER_ACCUMULATION) is not None or refused(bench, ADDED_WIDE):
        return
    engine, batch = bench.engine(accumulation_steps=len(SHARES), options=ADDED_WIDE), bench.batch(0).to(LOW)
    for factor in SHARES:
        engine.backward(share(factor)(bench.spec.loss(engine(batch.inputs), batch.target), bench.rank))
    bench.record("added", engine.full_grads())
    engine.close()


def judge_wide_sums(trial: Trial) -> Iterator[Comparison]:
    """The sum is bitwise that of float64, on any model: at three ranks within the bound of the reduction."""
    if trial.recorded("added"):
        half = replace(trial, baseline=replace(trial.baseline, dtype=LOW), dtype=LOW)
        shares = [half.locals(0, weigh=share(factor)) for factor in SHARES]
        yield from half.reduced("added", shares, exact=division_by(trial.world_size), scale=len(SHARES))
