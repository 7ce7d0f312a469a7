"""Whether two ranks start here, meet and compute together."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zharness.doctor.finding import Finding, State, fine
from zharness.errors import ZHarnessError
from zharness.world import RankServer

RANKS = 2
REMEDY = (
    "see the loopback interface, memory and processes; a wrong host name in /etc/hosts and a firewall on 127.0.0.1 "
    "keep ranks apart too"
)
SECONDS = 30.0  # for what takes one: beyond it something waits for what does not come


def added() -> float:
    """In a rank: the sum over ranks of rank + 1."""
    tensor = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    return float(tensor)


def two_ranks(seconds: float = SECONDS) -> Finding:
    """One all-reduce over two ranks. To be asked before any tensor operation of this process."""
    what, began = f"{RANKS} ranks", time.monotonic()
    try:
        with RankServer() as server:
            outcome = server.run(added, world_size=RANKS, timeout=seconds)
    except (ZHarnessError, OSError) as error:
        return Finding(what, State.PROBLEM, f"did not start: {error}", REMEDY)
    if outcome.cause is not None:
        return Finding(what, State.PROBLEM, outcome.cause.words(), REMEDY)
    sums = outcome.values()
    if sums != [sum(range(RANKS + 1))] * RANKS:
        return Finding(what, State.PROBLEM, f"their all-reduce gives {sums}", "this torch's gloo is broken: reinstall")
    return fine(what, f"started, met and reduced in {time.monotonic() - began:.1f} s")
