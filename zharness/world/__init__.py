"""Run a function on N ranks of this machine: fork the ranks, watch them, report how each ended, and clean up."""

from zharness.world.current_rank import assert_together, current_rank, exchange, is_rank
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome, RanksFailed
from zharness.world.server import RankServer, run
from zharness.world.task import CollectiveMode, GroupMode, Isolation, RankTask

# The older names of this module's public names.
End, Work, Collectives, Group, here = RankEnd, RankTask, CollectiveMode, GroupMode, current_rank

__all__ = [
    "CollectiveMode",
    "Collectives",
    "End",
    "Group",
    "GroupMode",
    "GroupOutcome",
    "Isolation",
    "RankEnd",
    "RankOutcome",
    "RankServer",
    "RankTask",
    "RanksFailed",
    "Work",
    "assert_together",
    "current_rank",
    "exchange",
    "here",
    "is_rank",
    "run",
]
