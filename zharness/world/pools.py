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

from zharness.world.orphans import end_strays
from zharness.world.outcome import End, GroupOutcome
from zharness.world.team import Team
from zharness.world.watch import Watch
from zharness.world.work import Dismissal, Isolation, Work


class Pools:
    """Gives every piece of work its team. ``inherited`` is what the ranks call where a Work says so."""

    def __init__(self, room: Path, inherited: Callable[..., Any] | None, echo: bool) -> None:
        self.room = room
        self._inherited = inherited
        self._echo = echo
        self._serials = count(1)
        self._teams: dict[tuple[str, int], Team] = {}
        self._to_learn: tuple[str, ...] = ()

    def run(self, work: Work, client: Connection | None) -> GroupOutcome:
        """The outcome of ``work``. Raises CannotStart when no rank can be had, and what a Watch raises."""
        work = replace(work, serial=next(self._serials))
        if work.isolation is Isolation.FRESH:
            team = Team(work, self._inherited, self.room, self._echo)
            try:
                outcome = Watch(team, work, client).outcome()
            finally:
                self._end(team)
        else:
            outcome = self._run_pooled(work, client)
        self._to_learn = outcome.ranks[0].imported if outcome.ranks else ()
        return outcome

    def _run_pooled(self, work: Work, client: Connection | None) -> GroupOutcome:
        """Ranks of which one ended, raised or was stopped are not used again; the rest is the client's to judge."""
        key = (work.pool, work.world_size)
        team = self._teams.pop(key, None)
        before = None
        if team is not None and not team.fit():
            before = self._parted(team, work.world_size, client)
            team = None
        if team is None and work.isolation is Isolation.LIVING:
            return GroupOutcome((), 0.0, before)
        if team is None:
            team = Team(work, self._inherited, self.room, self._echo)
        else:
            team.give(work)
        fit = False
        try:
            outcome = Watch(team, work, client).outcome()
            fit = all(rank.end is End.RETURNED for rank in outcome.ranks)
            return replace(outcome, before=before)
        finally:
            if fit:
                self._teams[key] = team
            else:
                self._end(team)

    def learn(self) -> None:
        """Import what the last ranks imported of torch, so that the next ones find it.

        torch loads some 800 modules at the first optimizer, DTensor or transform: a second in every rank, or once here.
        """
        names, self._to_learn = self._to_learn, ()
        for name in names:
            # A rank may have made a module up, or have had what it takes to import it: then it stays the ranks' own.
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
        if names:
            freeze()

    def dismiss(self, which: Dismissal, client: Connection | None) -> GroupOutcome | None:
        """End one team, and tell how each of its ranks ended; None when there is none."""
        team = self._teams.pop((which.pool, which.world_size), None)
        return None if team is None else self._parted(team, which.world_size, client)

    def _parted(self, team: Team, world_size: int, client: Connection | None) -> GroupOutcome:
        """The ends of ranks that wait for work, those that ended while they waited among them."""
        try:
            return Watch(team, Work(_nothing, world_size=world_size), client).parting()
        finally:
            self._end(team)

    def _end(self, team: Team) -> None:
        """End a team and what its ranks started, which this process adopts when they end."""
        team.end()
        end_strays({member.process.pid for living in self._teams.values() for member in living.members})

    def end(self) -> None:
        """End every team that lives on."""
        while self._teams:
            _, team = self._teams.popitem()
            team.end()


def freeze() -> None:
    """Keep the garbage collector's hands off what there is.

    Ranks share this process's memory until they write to it, and a collection writes to every object it sees.
    """
    gc.collect()
    gc.freeze()


def _nothing() -> None:
    """Work of which only the end is of interest."""
