"""The laws: what ranks record of an engine, and how a process that never imported the engine judges it."""

from zharness.law_kit.dtypes import DTYPES, LOSS_SCALES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.rank_context import RankContext
from zharness.laws.registry import LAWS, find_laws, get_law

__all__ = ["DTYPES", "LAWS", "LOSS_SCALES", "JudgeContext", "Law", "RankContext", "find_laws", "get_law"]
