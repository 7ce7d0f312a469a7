"""Collect all laws.

A law records tensors of an engine on every rank, and judges them in a process that never imports the engine.
"""

from zharness.law_kit.dtypes import DTYPES, LOSS_SCALES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.rank_context import RankContext
from zharness.laws.registry import LAWS, find_laws, get_law

__all__ = ["DTYPES", "LAWS", "LOSS_SCALES", "JudgeContext", "Law", "RankContext", "find_laws", "get_law"]
