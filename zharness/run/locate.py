"""A failed cell once more, module by module: where the first wrong number of a rank's own comes from."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.laws import get_law
from zharness.parity import Mismatch, Part
from zharness.parity.baseline import run_backward
from zharness.parity.module_divergence import find_divergences, record_trace
from zharness.run.observe_and_judge import build_baseline, build_cell_context

LOCAL_PARTS = (Part.FORWARD, Part.LOCAL_GRADIENT)  # what a rank computes on its own, with nobody's help


def can_locate_divergence(mismatch: Mismatch | None, cell: Cell, capabilities: Capabilities) -> bool:
    """Whether modules can be held against the baseline's, in the mismatch's micro-batch and the initial weights.

    Not where the engine's kernels differ from torch's, nor where a program led there, in other weights.
    """
    if mismatch is None or get_law(cell.law).steps_are_verbs:
        return False
    return mismatch.part in LOCAL_PARTS and cell.stage not in capabilities.own_kernels


def trace_path(evidence_dir: str, rank: int) -> Path:
    """Where the baseline's numbers for ``rank`` lie."""
    return Path(evidence_dir) / f"trace.{rank}.pt"


def record_baseline_trace(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> None:
    """In a process that never saw the engine: what passes through every module of the baseline, for each rank."""
    baseline = build_baseline(cell, salt, capabilities)
    for rank in range(cell.world_size):
        model, batch = baseline.build_module(), baseline.batch(rank, step)

        def run() -> None:
            output = baseline.compute_output(model, batch)  # noqa: B023 - called before the next rank
            run_backward(model, baseline.objective(output, batch), baseline.loss_scale)  # noqa: B023 - as above

        torch.save(record_trace(model, run), trace_path(evidence_dir, rank))


def locate_divergence(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> str:
    """In every rank: the same micro-batch in the initial weights, each module fed with the baseline's numbers.

    Returns the first departure in each direction in words; nothing where no module departs.
    """
    bench = build_cell_context(cell, salt, capabilities, {})
    engine = bench.build_engine()
    baseline = torch.load(trace_path(evidence_dir, dist.get_rank()), weights_only=True)
    found = find_divergences(engine.module, baseline, lambda: engine.backward(bench.loss(engine, step)))
    engine.close()
    return found.describe()
