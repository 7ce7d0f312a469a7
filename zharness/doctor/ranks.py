"""Whether two ranks start here, meet and compute together."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zharness.doctor.finding import Finding, Severity, ok_finding
from zharness.errors import ZHarnessError
from zharness.world import RankServer

WORLD_SIZE = 2
REMEDY = (
    "see the loopback interface, memory and processes; a wrong host name in /etc/hosts and a firewall on 127.0.0.1 "
    "keep ranks apart too"
)
TIMEOUT_SECONDS = 30.0  # for what takes one: beyond it something waits for what does not come


def sum_over_ranks() -> float:
    """In a rank: the sum over ranks of rank + 1."""
    tensor = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    return float(tensor)


def inspect_two_ranks(timeout: float = TIMEOUT_SECONDS) -> Finding:
    """One all-reduce over two ranks. To be asked before any tensor operation of this process."""
    what, began = f"{WORLD_SIZE} ranks", time.monotonic()
    try:
        with RankServer() as server:
            outcome = server.run(sum_over_ranks, world_size=WORLD_SIZE, timeout=timeout)
    except (ZHarnessError, OSError) as error:
        return Finding(what, Severity.PROBLEM, f"did not start: {error}", REMEDY)
    if outcome.cause is not None:
        return Finding(what, Severity.PROBLEM, outcome.cause.describe(), REMEDY)
    sums = outcome.values()
    if sums != [sum(range(WORLD_SIZE + 1))] * WORLD_SIZE:
        return Finding(
            what, Severity.PROBLEM, f"their all-reduce gives {sums}", "this torch's gloo is broken: reinstall"
        )
    return ok_finding(what, f"started, met and reduced in {time.monotonic() - began:.1f} s")
