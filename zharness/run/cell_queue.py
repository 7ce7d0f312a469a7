"""Decide which cell a free runner runs next, so that each runner keeps to one pool of ranks as long as it can.

Ranks are slow in the first cell of a kind: torch computes and remembers how to shard each operation. If two runners
shared the cells of a pool, each would have to warm up its own team of ranks for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from threading import Lock

from zharness.run.cell_planner import PlannedCell
from zharness.run.rank_pool import rank_pool

Group = Callable[[PlannedCell], Hashable]


def by_pool(planned: PlannedCell) -> Hashable:
    """Return the pool of a cell: a runner takes all cells of one pool that are left before it begins another."""
    return rank_pool(planned.cell)


def in_order(planned: PlannedCell) -> Hashable:
    """Return the same group for every cell: runners take all cells in their order."""
    return ""


class CellQueue:
    """The cells that no runner has taken, by group; threads may take cells at the same time."""

    def __init__(self, cells: Iterable[PlannedCell], group: Group) -> None:
        self._lock = Lock()
        self._left: dict[Hashable, deque[PlannedCell]] = {}
        self._group_of: dict[Hashable, Hashable] = {}  # the group from which each runner took its last cell
        for cell in cells:
            self._left.setdefault(group(cell), deque()).append(cell)

    def take(self, runner: Hashable) -> PlannedCell:
        """Return the next cell of the runner's group, else of a group that no other runner has, else of the largest."""
        with self._lock:
            group = self._group_of.pop(runner, None)
            if group not in self._left:
                of_others = set(self._group_of.values())
                largest = max(self._left, key=lambda other: len(self._left[other]))
                group = next((other for other in self._left if other not in of_others), largest)
            self._group_of[runner] = group
            cell = self._left[group].popleft()
            if not self._left[group]:
                del self._left[group]
            return cell
