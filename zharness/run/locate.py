"""Find the first module with wrong numbers in a cell in which one rank's own computation is wrong."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from zharness.cell import Cell
from zharness.device.float32_products import multiply_with
from zharness.engines import Capabilities
from zharness.law_kit.dtypes import choose_products
from zharness.laws import get_law
from zharness.parity import Mismatch, Part
from zharness.parity.baseline import run_backward
from zharness.parity.module_divergence import find_divergences, record_trace
from zharness.run.observe_and_judge import as_in_plain_torch, build_baseline, build_cell_context

LOCAL_PARTS = (Part.FORWARD, Part.LOCAL_GRADIENT)  # the parts of a step that a rank computes without other ranks


def can_locate_divergence(mismatch: Mismatch | None, cell: Cell, capabilities: Capabilities) -> bool:
    """Return whether a mismatch can be traced through modules.

    The trace runs one rank's part of a step with the initial weights and the micro-batch of the mismatch. So the
    mismatch has to be in a part that a rank computes without other ranks, the engine has to use torch's kernels, no
    program of engine verbs may have changed the weights, and no axis of a mesh may split the outputs of modules.
    """
    if mismatch is None or get_law(cell.law).programs is not None or cell.mesh.sizes:
        return False
    return mismatch.part in LOCAL_PARTS and cell.stage not in capabilities.own_kernels


def trace_path(evidence_dir: str, rank: int) -> Path:
    """Return the path of the baseline's trace for ``rank``."""
    return Path(evidence_dir) / f"trace.{rank}.pt"


def record_baseline_trace(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> None:
    """Record the inputs and outputs of every module of the baseline, for each rank, into ``evidence_dir``.

    Call this function in a process that never imported the engine.
    """
    baseline = build_baseline(cell, salt, capabilities)

    def record(rank: int) -> None:
        """Record the trace of one rank."""
        model, batch = baseline.build_module(), baseline.batch(rank, step)

        def run() -> None:
            """Run forward and backward of the baseline on this rank's micro-batch."""
            output = baseline.compute_output(model, batch)
            run_backward(model, baseline.objective(output, batch), baseline.loss_scale)

        torch.save(record_trace(model, run), trace_path(evidence_dir, rank))

    with as_in_plain_torch(cell):
        baseline.run_ranks(record)


def locate_divergence(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, step: int) -> str:
    """Run the engine with the initial weights on the mismatch's micro-batch, and trace its modules.

    Every rank has to call this function. Each module gets the inputs that the baseline's module got. Returns a
    description of the first module that departs from the baseline in forward and in backward, or an empty string if no
    module does.
    """
    ctx = build_cell_context(cell, salt, capabilities, {})
    with multiply_with(choose_products(cell.dtype)):
        engine = ctx.build_engine()
        baseline = torch.load(trace_path(evidence_dir, dist.get_rank()), weights_only=True)
        divergences = find_divergences(engine.module, baseline, lambda: engine.backward(ctx.loss(engine, step)))
        engine.close()
    return divergences.describe()
