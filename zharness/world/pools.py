"""Run the tasks of one rank server on rank teams, which are forked for one task or kept in pools for several."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zharness.world.orphans import kill_orphans
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome
from zharness.world.task import ClosePoolRequest, Isolation, RankTask
from zharness.world.task_watcher import TaskWatcher
from zharness.world.team import RankTeam


class RankPools:
    """Runs tasks on rank teams. Each task runs on a new team or on a team that is kept in a pool.

    ``inherited_function`` replaces ``inherited_function_placeholder`` in tasks. If ``echo`` is True, the ranks' output
    is also written to standard output.
    """

    def __init__(self, scratch_dir: Path, inherited_function: Callable[..., Any] | None, echo: bool) -> None:
        self.scratch_dir = scratch_dir
        self._inherited_function = inherited_function
        self._echo = echo
        self._serials = count(1)
        self._teams: dict[tuple[str, int], RankTeam] = {}
        self._modules_to_import: tuple[str, ...] = ()

    def run(self, task: RankTask, client: Connection | None) -> GroupOutcome:
        """Run a task and return its outcome.

        Raises CannotStart if the ranks cannot be forked, ClientGone if the client has ended, and TaskCancelled if the
        client cancelled the task.
        """
        task = replace(task, serial=next(self._serials))
        if task.isolation is Isolation.FRESH:
            team = self._fork_team(task)
            try:
                outcome = TaskWatcher(team, task, client).wait_for_outcome()
            finally:
                self._close_team(team)
        else:
            outcome = self._run_pooled(task, client)
        new_modules = outcome.ranks[0].imported_modules if outcome.ranks else ()
        self._modules_to_import = (*self._modules_to_import, *new_modules)
        return outcome

    def _run_pooled(self, task: RankTask, client: Connection | None) -> GroupOutcome:
        """Run a task on the team of its pool, or on a new team if the pool has none; return the outcome.

        The team is kept for further tasks only if the function returned on every rank, or, if the task says so, raised
        the same error on every rank.
        """
        key = (task.pool, task.world_size)
        team = self._teams.pop(key, None)
        previous_outcome = None
        if team is not None and not team.is_reusable():
            previous_outcome = self._close_and_judge(team, task.world_size, client)
            team = None
        if team is None and task.isolation is Isolation.EXISTING_POOL:
            return GroupOutcome((), 0.0, previous_outcome)
        if team is None:
            team = self._fork_team(task)
        else:
            team.send_task(task)
        is_kept = False
        try:
            outcome = TaskWatcher(team, task, client).wait_for_outcome()
            is_kept = can_reuse_ranks(outcome, task.isolation)
            return replace(outcome, previous_outcome=previous_outcome)
        finally:
            if is_kept:
                self._teams[key] = team
            else:
                self._close_team(team)

    def _fork_team(self, task: RankTask) -> RankTeam:
        """Fork a team that runs ``task`` first, after importing the modules that earlier ranks imported."""
        self._import_rank_modules()
        return RankTeam(task, self._inherited_function, self.scratch_dir, self._echo)

    def _import_rank_modules(self) -> None:
        """Import the modules of torch that earlier ranks imported, so that new ranks inherit them.

        torch imports about 800 modules when the first optimizer, DTensor or transform is used, which takes a second.
        Without this method, every new rank would need that second.
        """
        names, self._modules_to_import = self._modules_to_import, ()
        for name in names:
            # A rank may have created a module itself or changed sys.path first: only ranks can import such modules.
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
        if names:
            freeze_garbage_collector()

    def close_pool(self, request: ClosePoolRequest, client: Connection | None) -> GroupOutcome | None:
        """End the team of one pool, and return how its ranks ended; None if the pool does not exist."""
        team = self._teams.pop((request.pool, request.world_size), None)
        return None if team is None else self._close_and_judge(team, request.world_size, client)

    def _close_and_judge(self, team: RankTeam, world_size: int, client: Connection | None) -> GroupOutcome:
        """End a team whose ranks are idle, and return how each rank ended. A rank may have died while it was idle."""
        try:
            return TaskWatcher(team, RankTask(_no_op, world_size=world_size), client).shut_down_idle_ranks()
        finally:
            self._close_team(team)

    def _close_team(self, team: RankTeam) -> None:
        """End a team, and kill the processes that its ranks left running; this process has become their parent."""
        team.close()
        kill_orphans({member.process.pid for other in self._teams.values() for member in other.members})

    def close(self) -> None:
        """End the teams of all pools."""
        while self._teams:
            _, team = self._teams.popitem()
            team.close()


def can_reuse_ranks(outcome: GroupOutcome, isolation: Isolation) -> bool:
    """Return whether the ranks of a finished task can run another task.

    Ranks that raised can run another task for POOLED_AFTER_ERRORS if all tracebacks have the same lines, those of torch
    included, and if all ranks started the same number of collectives, because a loop may have run a different number
    of times on each rank. Ranks that were killed have no traceback.
    """
    if all(rank.end is RankEnd.RETURNED for rank in outcome.ranks):
        return True
    calls = {(rank.exception, list_called_lines(rank.traceback)) for rank in outcome.ranks}
    have_raised = all(rank.end is RankEnd.RAISED and rank.traceback for rank in outcome.ranks)
    may_raise = isolation is Isolation.POOLED_AFTER_ERRORS
    return may_raise and have_raised and len(calls) == 1 and have_equal_counts(outcome.ranks)


def have_equal_counts(ranks: Sequence[RankOutcome]) -> bool:
    """Return whether all ranks of each process group have started the same number of collectives on it."""
    return all(
        ranks[member].collective_counts.get(group) == count
        for rank in ranks
        for group, count in rank.collective_counts.items()
        for member in group[1]
    )


def list_called_lines(text: str) -> tuple[str, ...]:
    """Return the lines of a traceback that name a file, a line and a function."""
    return tuple(line for line in text.splitlines() if line.lstrip().startswith('File "'))


def freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection, so that forked ranks continue to share their memory.

    A forked rank and this process share a page of memory until either writes to the page, and a garbage collection
    writes to every object that it visits. Garbage is not collected first, for the same reason: this process is itself
    a fork, and the collection would copy the objects of torch, in 0.2 seconds.
    """
    gc.freeze()


def _no_op() -> None:
    """Do nothing; this is the function of a task that is only used to end its ranks."""
