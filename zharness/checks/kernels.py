"""The law of kernels: an engine's own are as near to float64 as torch's, and what is reduced is what they give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.trial import Trial
from zharness.parity import Comparison, Part, ranks_agree, within
from zharness.parity.bounds import gamma, mean_and_bound
from zharness.parity.calibrated import calibrated_comparison, calibration
from zharness.parity.certificate import is_power_of_two
from zharness.parity.compare import beside, check_names


def observe_kernels(bench: Bench) -> None:
    """Each rank's loss alone, which gives its local gradient over the world size, and then all of them."""
    engine = bench.engine(optimizer=FROZEN)
    for chosen in range(bench.world_size + 1):
        counts = chosen in (bench.rank, bench.world_size)
        engine.backward(bench.loss(engine, 0, f"loss-{chosen}") * float(counts))
        bench.record("grads", engine.full_grads(), chosen)
        engine.step()
        engine.zero_grad()
    engine.close()


def plain_gradient(trial: Trial, rank: int, name: str) -> Tensor:
    """What plain torch computes on one rank's micro-batch."""
    return trial.baseline.local(rank, 0).grads[name]


def judge_kernels(trial: Trial) -> Iterator[Comparison]:
    """Local gradients by tier C, their reduction by tier S against the engine's own."""
    size = trial.world_size
    own = []
    for rank in range(size):
        calibrated = calibration(trial.baseline, rank)
        alone = trial.copies("grads", rank)[0]
        check_names("full_grads", calibrated.oracle, alone)
        own.append({name: grad.double() * size for name, grad in alone.items()})
        found = calibrated_comparison(trial.place("", Part.LOCAL_GRADIENT, seen_on=rank), calibrated, own[rank])
        if found.mismatch is not None:
            found = beside(found, partial(plain_gradient, trial, rank, found.mismatch.parameter))
        yield found
    everyone = trial.copies("grads", size)
    for name in own[0]:
        terms = [grads[name] for grads in own]
        held = everyone[0][name].dtype
        wire = trial.wire_of(name, held)
        mean, bound = mean_and_bound(terms, wire, held)
        if not is_power_of_two(size):  # then a gradient alone was rounded when it was divided
            bound = bound + gamma(1, wire) * sum(term.abs() for term in terms) / size
        for rank, copy in enumerate(everyone):
            yield within(trial.place(name, Part.REDUCTION, 0, rank), mean, copy[name], bound)
        yield from ranks_agree(trial.place(name, Part.REDUCTION), [copy[name] for copy in everyone])
