"""Faults that show only when ranks that lived on are torn down or leave: reports of the last test that used them."""

from __future__ import annotations

import pytest

from zharness.world import GroupOutcome


def make_pool_teardown_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """A failed teardown of ``item`` when a finaliser of a wider scope raised, or a rank ended otherwise than it should.

    Empty when everything went down as it should.
    """
    left = [f"rank {rank.rank} left behind: {what}" for rank in outcome.ranks for what in rank.leftovers]
    if not outcome.failures and not left:
        return []
    words = "\n".join([*left, outcome.describe()]).strip()
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"in ranks that lived on, after this test, which was the last one that they ran:\n{words}",
        when="teardown",
    )
    return [report]
