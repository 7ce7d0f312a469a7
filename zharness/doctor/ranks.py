"""Inspect whether two ranks can start on this machine, connect to each other and complete a collective."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zharness.device import rank_device
from zharness.doctor.finding import Finding, Severity, ok_finding
from zharness.errors import ZHarnessError
from zharness.world import RankServer

WORLD_SIZE = 2
REMEDY = (
    "see the loopback interface, memory and processes; also check /etc/hosts for a wrong host name, and for a firewall "
    "on 127.0.0.1"
)
TIMEOUT_SECONDS = 30.0  # a loaded machine needs about half of it to start two ranks


def sum_over_ranks() -> float:
    """Return the sum of rank + 1 over all ranks, computed by an all-reduce. Every rank calls this function."""
    rank = dist.get_rank()
    tensor = torch.tensor(rank + 1.0, device=rank_device(rank))
    dist.all_reduce(tensor)
    return float(tensor)


def inspect_two_ranks(timeout: float = TIMEOUT_SECONDS) -> Finding:
    """Run one all-reduce on two new ranks and return the finding.

    Call this function before the first tensor operation of this process, after which no rank can be forked.
    """
    title, started_at = f"{WORLD_SIZE} ranks", time.monotonic()
    try:
        with RankServer() as server:
            outcome = server.run(sum_over_ranks, world_size=WORLD_SIZE, timeout=timeout)
    except (ZHarnessError, OSError) as error:
        return Finding(title, Severity.PROBLEM, f"did not start: {error}", REMEDY)
    if outcome.cause is not None:
        return Finding(title, Severity.PROBLEM, outcome.cause.describe(), REMEDY)
    sums = outcome.values()
    if sums != [sum(range(WORLD_SIZE + 1))] * WORLD_SIZE:
        return Finding(
            title, Severity.PROBLEM, f"their all-reduce gives {sums}", "torch's collectives are broken: reinstall torch"
        )
    return ok_finding(title, f"started, connected and reduced in {time.monotonic() - started_at:.1f} s")
