"""Find the module in which a local wrong number of a failed cell begins."""

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

LOCAL_PARTS = (Part.FORWARD, Part.LOCAL_GRADIENT)  # what a rank computes without other ranks


def can_locate_divergence(mismatch: Mismatch | None, cell: Cell, capabilities: Capabilities) -> bool:
    """Return whether a mismatch can be traced through modules.

    Only what a rank computes without other ranks can be traced, in the initial weights and the mismatch's micro-batch:
    not if the engine's kernels differ from torch's, nor if a program of engine verbs had changed the weights.
    """
    if mismatch is None or get_law(cell.law).steps_are_verbs:
        return False
    return mismatch.part in LOCAL_PARTS and cell.stage not in capabilities.own_kernels


def trace_path(evidence_dir: str, rank: int) -> Path:
    """Return the path of the baseline's trace for ``rank``."""
    return Path(evidence_dir) / f"trace.{rank}.pt"


def record_baseline_trace(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> None:
    """Record the inputs and outputs of every module of the baseline, for each rank, into ``evidence_dir``.

    Runs in a process that never imported the engine.
    """
    baseline = build_baseline(cell, salt, capabilities)
    for rank in range(cell.world_size):
        model, batch = baseline.build_module(), baseline.batch(rank, step)

        def run() -> None:
            output = baseline.compute_output(model, batch)  # noqa: B023 - called before the next rank
            run_backward(model, baseline.objective(output, batch), baseline.loss_scale)  # noqa: B023 - as above

        torch.save(record_trace(model, run), trace_path(evidence_dir, rank))


def locate_divergence(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> str:
    """In every rank: run the engine on the mismatch's micro-batch in the initial weights, and trace its modules.

    Each module gets the baseline's inputs. Returns a description of the first module that departs in each direction, or
    an empty string.
    """
    ctx = build_cell_context(cell, salt, capabilities, {})
    engine = ctx.build_engine()
    baseline = torch.load(trace_path(evidence_dir, dist.get_rank()), weights_only=True)
    divergences = find_divergences(engine.module, baseline, lambda: engine.backward(ctx.loss(engine, step)))
    engine.close()
    return divergences.describe()
