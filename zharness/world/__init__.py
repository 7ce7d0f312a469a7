"""N ranks on this machine: forked, watched, judged one by one, and gone when their work is done."""

from zharness.world.here import assert_together, exchange, here, is_rank
from zharness.world.outcome import End, GroupOutcome, RankOutcome, RanksFailed
from zharness.world.server import RankServer, run
from zharness.world.work import Collectives, Group, Isolation, Work

__all__ = [
    "Collectives",
    "End",
    "Group",
    "GroupOutcome",
    "Isolation",
    "RankOutcome",
    "RankServer",
    "RanksFailed",
    "Work",
    "assert_together",
    "exchange",
    "here",
    "is_rank",
    "run",
]
