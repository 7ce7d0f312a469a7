"""N ranks on this machine: forked, watched, judged one by one, and gone when their work is done."""

from zharness.world.current_rank import assert_together, current_rank, exchange, is_rank
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome, RanksFailed
from zharness.world.server import RankServer, run
from zharness.world.task import CollectiveMode, Group, Isolation, RankTask

__all__ = [
    "CollectiveMode",
    "Group",
    "GroupOutcome",
    "Isolation",
    "RankEnd",
    "RankOutcome",
    "RankServer",
    "RankTask",
    "RanksFailed",
    "assert_together",
    "current_rank",
    "exchange",
    "is_rank",
    "run",
]
