"""Report problems that appear only when a rank pool is torn down, as failures of the last test that ran in the pool."""

from __future__ import annotations

import pytest

from zharness.world import GroupOutcome


def make_pool_teardown_reports(item: pytest.Item, outcome: GroupOutcome) -> list[pytest.TestReport]:
    """Return a failed teardown report of ``item`` if a teardown raised, a rank failed, or a rank left something behind.

    ``outcome`` describes how each rank of the pool ended or tore down its fixtures. Returns an empty list if no rank
    had a problem.
    """
    leftovers = [f"rank {rank.rank} left behind: {leftover}" for rank in outcome.ranks for leftover in rank.leftovers]
    if not outcome.failures and not leftovers:
        return []
    details = "\n".join([*leftovers, outcome.describe()]).strip()
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"while the rank pool was torn down; this was the last test that it ran:\n{details}",
        when="teardown",
    )
    return [report]
