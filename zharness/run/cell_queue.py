"""Decide which cell a free runner runs next, so that each runner keeps to one pool of ranks and one model.

Ranks are slow in the first cell of a pool and model: torch computes and caches how to shard each operation of a model.
If two runners shared the cells of a pool or of a model, each would have to warm up its own team of ranks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import NamedTuple

from zharness.run.cell_planner import PlannedCell
from zharness.run.rank_pool import rank_pool


class CellGroup(NamedTuple):
    """The pool and the model of some cells."""

    pool: Hashable
    model: str


CellGrouping = Callable[[PlannedCell], CellGroup]


def group_by_pool(planned: PlannedCell) -> CellGroup:
    """Return the pool and the model of a cell: a runner takes all cells of one group before those of another group."""
    return CellGroup(rank_pool(planned.cell), planned.cell.model)


def keep_order(planned: PlannedCell) -> CellGroup:
    """Return the same group for every cell, so that runners take the cells in their given order."""
    return CellGroup("", "")


class CellQueue:
    """The cells that no runner has taken, by group; threads may take cells at the same time."""

    def __init__(self, cells: Iterable[PlannedCell], grouping: CellGrouping) -> None:
        self._lock = Lock()
        self._left: dict[CellGroup, deque[PlannedCell]] = {}
        self._group_of: dict[Hashable, CellGroup] = {}  # the group from which each runner took its last cell
        for cell in cells:
            self._left.setdefault(grouping(cell), deque()).append(cell)

    def take(self, runner: Hashable) -> PlannedCell:
        """Remove and return the next cell of the runner's group, or of another group if its group is empty."""
        with self._lock:
            group = self._choose_group(self._group_of.pop(runner, None))
            self._group_of[runner] = group
            cell = self._left[group].popleft()
            if not self._left[group]:
                del self._left[group]
            return cell

    def _choose_group(self, last: CellGroup | None) -> CellGroup:
        """Return ``last`` if it has cells left, else a group of its pool, else of a pool that no other runner has.

        Take from another runner's group only if nothing else is left, from the largest: two runners then finish that
        group together.
        """
        if last in self._left:
            return last
        others = set(self._group_of.values())
        pools_of_others = {group.pool for group in others}

        def cost(group: CellGroup) -> tuple[bool, bool, bool, int]:
            has_others = group.pool in pools_of_others
            size = len(self._left[group]) if group in others else 0
            return group in others, last is None or group.pool != last.pool, has_others, -size

        return min(self._left, key=cost)
