"""N ranks on this machine: forked, watched, judged one by one, and gone when their work is done."""

from zharness.world.outcome import End, GroupOutcome, RankOutcome, RanksFailed
from zharness.world.server import RankServer, run
from zharness.world.work import Group, Work

__all__ = ["End", "Group", "GroupOutcome", "RankOutcome", "RankServer", "RanksFailed", "Work", "run"]
