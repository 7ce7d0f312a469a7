"""Time the steps of the plain model and of engines on the same ranks, alternating, so that noise affects all."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from engines_bench.work import Size, batch, build, precision, this_device, train

PLAIN = ("plain", 0)
# Groups of engines that share their processes. DeepSpeed's stage 3 runs alone: it replaces torch.nn.functional.linear
# process-wide.
TEAMS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("reference", 0), ("reference", 1), ("reference", 2), ("reference", 3)),
    (("ddp", 0), ("fsdp2", 3)),
    (("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)),
    (("deepspeed", 3),),
)


@dataclass(frozen=True)
class Plan:
    """The plan of a measurement: ``rounds`` rounds of ``steps`` steps for each engine.

    Each rank trains on ``samples`` x ``length`` tokens per step, in ``dtype``. Rounds get fewer and shorter, down to
    one of one step, so that they end before ``deadline``, which is in seconds of ``time.time``.
    """

    size: Size
    rounds: int
    steps: int
    samples: int
    length: int
    fused: bool
    dtype: str = "fp32"
    deadline: float = math.inf


def time_steps(team: tuple[tuple[str, int], ...], plan: Plan) -> dict[tuple[str, int], list[list[float]]]:
    """Return the seconds of each step by round, for the plain model and each engine of ``team``; runs on a rank."""
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    ids = batch(plan.size, plan.samples, plan.length).to(this_device())
    built = {
        (name, stage): build(name, stage, plan.size, plan.samples, plan.fused, **precision(name, plan.dtype))
        for name, stage in (PLAIN, *team)
    }
    rounds: dict[tuple[str, int], list[list[float]]] = {key: [] for key in built}
    steps, round_seconds = 1, math.inf  # of the warm-up
    for number in range(plan.rounds + 1):
        left = share_number(plan.deadline - time.time())
        if number == 1:
            steps = max(1, min(plan.steps, int(left / round_seconds / plan.rounds)))
        elif number > 1 and left < round_seconds:
            break
        if dist.get_rank() == 0:
            print(f"  round {number} of {plan.rounds}{' (warm-up)' if number == 0 else ''}", file=sys.stderr)
        begun = perf_counter()
        for key, engine in built.items():
            dist.barrier()
            seconds = []
            for _ in range(steps):
                start = perf_counter()
                train(engine, ids)
                finish_kernels()
                seconds.append(perf_counter() - start)
            rounds[key].append(seconds)
        round_seconds = share_number(perf_counter() - begun)
    return {key: timed[1:] for key, timed in rounds.items()}  # without the warm-up


def share_number(number: float) -> float:
    """Return rank 0's number on every rank, so that all of them run the same rounds. At most 1e9."""
    shared = torch.tensor(min(number, 1e9), dtype=torch.float64, device=this_device())
    dist.broadcast(shared, 0)
    return shared.item()


def finish_kernels() -> None:
    """Wait until this rank's GPU has done what was launched, so that a step's time has its kernels in it."""
    if this_device().type == "cuda":
        torch.cuda.synchronize()
