"""The teams of one server: forked for one piece of work, or living on from one to the next."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zharness.world.orphans import kill_orphans
from zharness.world.outcome import GroupOutcome, RankEnd
from zharness.world.task import ClosePoolRequest, Isolation, RankTask
from zharness.world.task_watcher import TaskWatcher
from zharness.world.team import RankTeam


class RankPools:
    """Gives every piece of work its team. ``inherited`` is what the ranks call where a Work says so."""

    def __init__(self, scratch_dir: Path, inherited_function: Callable[..., Any] | None, echo: bool) -> None:
        self.scratch_dir = scratch_dir
        self._inherited_function = inherited_function
        self._echo = echo
        self._serials = count(1)
        self._teams: dict[tuple[str, int], RankTeam] = {}
        self._modules_to_import: tuple[str, ...] = ()

    def run(self, task: RankTask, client: Connection | None) -> GroupOutcome:
        """The outcome of ``work``. Raises CannotStart when no rank can be had, and what a Watch raises."""
        task = replace(task, serial=next(self._serials))
        if task.isolation is Isolation.FRESH:
            team = RankTeam(task, self._inherited_function, self.scratch_dir, self._echo)
            try:
                outcome = TaskWatcher(team, task, client).wait_for_outcome()
            finally:
                self._close_team(team)
        else:
            outcome = self._run_pooled(task, client)
        self._modules_to_import = outcome.ranks[0].imported_modules if outcome.ranks else ()
        return outcome

    def _run_pooled(self, task: RankTask, client: Connection | None) -> GroupOutcome:
        """Ranks of which one ended, raised or was stopped are not used again; the rest is the client's to judge."""
        key = (task.pool, task.world_size)
        team = self._teams.pop(key, None)
        before = None
        if team is not None and not team.is_reusable():
            before = self._close_and_judge(team, task.world_size, client)
            team = None
        if team is None and task.isolation is Isolation.EXISTING_POOL:
            return GroupOutcome((), 0.0, before)
        if team is None:
            team = RankTeam(task, self._inherited_function, self.scratch_dir, self._echo)
        else:
            team.send_task(task)
        fit = False
        try:
            outcome = TaskWatcher(team, task, client).wait_for_outcome()
            fit = all(rank.end is RankEnd.RETURNED for rank in outcome.ranks)
            return replace(outcome, previous_outcome=before)
        finally:
            if fit:
                self._teams[key] = team
            else:
                self._close_team(team)

    def import_rank_modules(self) -> None:
        """Import what the last ranks imported of torch, so that the next ones find it.

        torch loads some 800 modules at the first optimizer, DTensor or transform: a second in every rank, or once here.
        """
        names, self._modules_to_import = self._modules_to_import, ()
        for name in names:
            # A rank may have made a module up, or have had what it takes to import it: then it stays the ranks' own.
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
        if names:
            freeze_garbage_collector()

    def close_pool(self, request: ClosePoolRequest, client: Connection | None) -> GroupOutcome | None:
        """End one team, and tell how each of its ranks ended; None when there is none."""
        team = self._teams.pop((request.pool, request.world_size), None)
        return None if team is None else self._close_and_judge(team, request.world_size, client)

    def _close_and_judge(self, team: RankTeam, world_size: int, client: Connection | None) -> GroupOutcome:
        """The ends of ranks that wait for work, those that ended while they waited among them."""
        try:
            return TaskWatcher(team, RankTask(_no_op, world_size=world_size), client).shut_down_idle_ranks()
        finally:
            self._close_team(team)

    def _close_team(self, team: RankTeam) -> None:
        """End a team and what its ranks started, which this process adopts when they end."""
        team.close()
        kill_orphans({member.process.pid for living in self._teams.values() for member in living.members})

    def close(self) -> None:
        """End every team that lives on."""
        while self._teams:
            _, team = self._teams.popitem()
            team.close()


def freeze_garbage_collector() -> None:
    """Keep the garbage collector's hands off what there is.

    Ranks share this process's memory until they write to it, and a collection writes to every object it sees.
    """
    gc.collect()
    gc.freeze()


def _no_op() -> None:
    """Work of which only the end is of interest."""
