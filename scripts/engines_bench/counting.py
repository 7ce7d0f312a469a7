"""What the reference engine holds, sends and gathers, counted and not timed; and what grows over many steps."""

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

SAMPLES, LENGTH = 1, 16  # bytes do not depend on them


def held(size: Size) -> list[dict[str, float]]:
    """In a rank: for each stage, bytes held, sent and gathered, beside what the formulas say."""
    torch.set_num_threads(1)
    ids = batch(size, SAMPLES, LENGTH)
    return [row for stage in range(4) for row in counted(size, stage, ids)]


def counted(size: Size, stage: int, ids: torch.Tensor) -> Iterator[dict[str, float]]:
    for steps in (1, 2):
        owner = AccumulationOwner.ENGINE
        built = build("reference", stage, size, SAMPLES, accumulation_steps=steps, accumulation_owner=owner)
        engine: Any = built.engine  # type: ignore[attr-defined]
        psi = 4 * sum(p.numel() for p in engine.module.parameters()) if stage < 3 else psi_of(size)
        for _ in range(steps):
            train_micro(built, ids)
        engine.comm.reset()
        engine.reset_peak()
        for micro in range(steps):
            built.backward(loss(built, ids))
            gradients = engine.held_bytes()["gradients"] if micro == steps - 1 else 0
            built.step()
        now, ranks = engine.held_bytes(), dist.get_world_size()
        yield {
            "stage": stage,
            "ranks": ranks,
            "micro-batches": steps,
            "held": now["parameters"] + gradients + now["optimizer_state"],
            "formula": formula(stage, ranks, psi),
            "sent": engine.comm.logical_bytes(),
            "volume": volume(stage, steps, psi) * (ranks - 1) / ranks,
            "gathered at rest": engine.gathered_bytes(),
            "gathered peak": engine.peak_gathered_bytes(),
            "gathered allowed": allowed(size) if stage == 3 else 0,
        }
        built.close()


def train_micro(engine: Engine, ids: torch.Tensor) -> None:
    engine.backward(loss(engine, ids))
    engine.step()


def psi_of(size: Size) -> int:
    return 4 * sum(p.numel() for p in skeleton(size).parameters())


def skeleton(size: Size) -> nn.Module:
    """The model without memory: only its shapes."""
    with torch.device("meta"):
        return Model(size)


def formula(stage: int, ranks: int, psi: float) -> float:
    """Bytes per rank with AdamW in fp32: psi parameters, psi gradients, 2 psi state, each over N where sharded."""
    shares = ((1, 3), (1, 2), (2, 1))
    return sum(copies * psi / (ranks if stage >= sharded_from else 1) for copies, sharded_from in shares)


def volume(stage: int, steps: int, psi: float) -> float:
    """Bytes that a step of ``steps`` micro-batches asks of the collectives, before the factor (N-1)/N."""
    return psi * (2, 2, steps + 1, 3 * steps)[stage]


def allowed(size: Size) -> float:
    """The two largest modules, and the bucket that they were gathered with."""
    own = sorted(sum(4 * p.numel() for p in m.parameters(recurse=False)) for m in skeleton(size).modules())
    return sum(own[-2:]) + 4 * DEFAULT_BUCKET_SIZE


def grown(stage: int, steps: int) -> dict[str, float]:
    """In a rank: what this process has more of after ``steps`` steps of the tiny model than after a tenth of them."""
    torch.set_num_threads(1)
    size = SIZES["tiny"]
    ids, engine = batch(size, SAMPLES, LENGTH), build("reference", stage, size, SAMPLES)
    for _ in range(steps // 10):
        train(engine, ids)
    before = process()
    for _ in range(steps):
        train(engine, ids)
    after = process()
    return {"stage": stage, **{name: after[name] - before[name] for name in before}}


def process() -> dict[str, float]:
    for _ in range(8):  # a backend's thread lets go of a collective's tensors only after the next one
        dist.barrier()
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return {
        "tensors": len(tensors),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
