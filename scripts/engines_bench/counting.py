"""Count the bytes that the reference engine holds, sends and gathers, and its tensors, threads and files over steps."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engines_bench.work import SIZES, Model, Size, batch, build, loss, train
from zharness.engines import AccumulationOwner, Engine
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE

SAMPLES, LENGTH = 1, 16  # the size of a micro-batch, on which the byte counts do not depend


def count_bytes(size: Size) -> list[dict[str, float]]:
    """Return one row per stage and window length: bytes held, sent and gathered, and their formulas; runs on a rank."""
    torch.set_num_threads(1)
    ids = batch(size, SAMPLES, LENGTH)
    return [row for stage in range(4) for row in count_stage_bytes(size, stage, ids)]


def count_stage_bytes(size: Size, stage: int, ids: torch.Tensor) -> Iterator[dict[str, float]]:
    """Yield the rows of one stage, with accumulation windows of one and two micro-batches."""
    for steps in (1, 2):
        owner = AccumulationOwner.ENGINE
        built = build("reference", stage, size, SAMPLES, accumulation_steps=steps, accumulation_owner=owner)
        engine: Any = built.engine  # type: ignore[attr-defined]
        psi = 4 * sum(p.numel() for p in engine.module.parameters()) if stage < 3 else count_parameter_bytes(size)
        for _ in range(steps):
            train_micro(built, ids)
        engine.comm.reset()
        engine.reset_peak()
        for micro in range(steps):
            built.backward(loss(built, ids))
            gradients = engine.allocated_bytes()["gradients"] if micro == steps - 1 else 0
            built.step()
        held, ranks = engine.allocated_bytes(), dist.get_world_size()
        yield {
            "stage": stage,
            "ranks": ranks,
            "micro-batches": steps,
            "held": held["parameters"] + gradients + held["optimizer_state"],
            "formula": expected_held_bytes(stage, ranks, psi),
            "sent": engine.comm.logical_bytes(),
            "volume": expected_volume(stage, steps, psi) * (ranks - 1) / ranks,
            "gathered at rest": engine.gathered_bytes(),
            "gathered peak": engine.peak_gathered_bytes(),
            "gathered allowed": allowed_gathered_bytes(size) if stage == 3 else 0,
        }
        built.close()


def train_micro(engine: Engine, ids: torch.Tensor) -> None:
    """Run forward, backward and ``step`` of one micro-batch."""
    engine.backward(loss(engine, ids))
    engine.step()


def count_parameter_bytes(size: Size) -> int:
    """Return the bytes of all parameters in fp32."""
    return 4 * sum(p.numel() for p in build_meta_model(size).parameters())


def build_meta_model(size: Size) -> nn.Module:
    """Build the model on the meta device: shapes without storage."""
    with torch.device("meta"):
        return Model(size)


def expected_held_bytes(stage: int, ranks: int, psi: float) -> float:
    """Return the bytes per rank with AdamW in fp32: psi parameters, psi gradients, 2 psi state, over N if sharded."""
    shares = ((1, 3), (1, 2), (2, 1))
    return sum(copies * psi / (ranks if stage >= sharded_from else 1) for copies, sharded_from in shares)


def expected_volume(stage: int, steps: int, psi: float) -> float:
    """Return the bytes of the collectives of a window of ``steps`` micro-batches, before the factor (N-1)/N."""
    return psi * (2, 2, steps + 1, 3 * steps)[stage]


def allowed_gathered_bytes(size: Size) -> float:
    """Return the limit on gathered bytes: the two largest modules and one all-gather bucket."""
    sizes = sorted(sum(4 * p.numel() for p in m.parameters(recurse=False)) for m in build_meta_model(size).modules())
    return sum(sizes[-2:]) + 4 * DEFAULT_BUCKET_SIZE


def measure_growth(stage: int, steps: int) -> dict[str, float]:
    """Train the tiny model for ``steps`` steps after a warm-up; return how much this process's counts grew.

    Runs on a rank. The warm-up is a tenth of ``steps``.
    """
    torch.set_num_threads(1)
    size = SIZES["tiny"]
    ids, engine = batch(size, SAMPLES, LENGTH), build("reference", stage, size, SAMPLES)
    for _ in range(steps // 10):
        train(engine, ids)
    before = count_process_resources()
    for _ in range(steps):
        train(engine, ids)
    after = count_process_resources()
    return {"stage": stage, **{name: after[name] - before[name] for name in before}}


def count_process_resources() -> dict[str, float]:
    """Return this process's numbers of tensors, threads and open files, and its peak memory."""
    for _ in range(8):  # a backend's thread releases the tensors of a collective only at the next one
        dist.barrier()
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if isinstance(candidate, torch.Tensor)]
    return {
        "tensors": len(tensors),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
