"""A failed cell once more, module by module: where the first wrong number of a rank's own comes from."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from zharness.case import Case
from zharness.checks import check_named
from zharness.engines import Capabilities
from zharness.parity import Mismatch, Part
from zharness.parity.baseline import differentiated
from zharness.parity.modules import departures, record
from zharness.run.cell import baseline_of, bench_of

LOCAL = (Part.FORWARD, Part.LOCAL_GRADIENT)  # what a rank computes on its own, with nobody's help


def worth_locating(mismatch: Mismatch | None, case: Case, claims: Capabilities) -> bool:
    """Whether modules can be held against the baseline's, in the mismatch's micro-batch and the initial weights.

    Not where the engine's kernels differ from torch's, nor where a program led there, in other weights.
    """
    if mismatch is None or check_named(case.check).by_verb:
        return False
    return mismatch.part in LOCAL and case.stage not in claims.own_kernels


def trace_path(room: str, rank: int) -> Path:
    """Where the baseline's numbers for ``rank`` lie."""
    return Path(room) / f"trace.{rank}.pt"


def trace(case: Case, salt: int, room: str, capabilities: Capabilities, step: int) -> None:
    """In a process that never saw the engine: what passes through every module of the baseline, for each rank."""
    baseline = baseline_of(case, salt, capabilities)
    for rank in range(case.world_size):
        model, batch = baseline.module(), baseline.batch(rank, step)

        def run() -> None:
            output = baseline.output(model, batch)  # noqa: B023 - called before the next rank
            differentiated(model, baseline.objective(output, batch), baseline.loss_scale)  # noqa: B023 - as above

        torch.save(record(model, run), trace_path(room, rank))


def locate(case: Case, salt: int, room: str, capabilities: Capabilities, step: int) -> str:
    """In every rank: the same micro-batch in the initial weights, each module fed with the baseline's numbers.

    Returns the first departure in each direction in words; nothing where no module departs.
    """
    bench = bench_of(case, salt, capabilities, {})
    engine = bench.engine()
    baseline = torch.load(trace_path(room, dist.get_rank()), weights_only=True)
    found = departures(engine.module, baseline, lambda: engine.backward(bench.loss(engine, step)))
    engine.close()
    return found.words()
