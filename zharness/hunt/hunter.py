"""Run draws until the time is over, and confirm, shrink, group and export their alarms."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from zharness.export.shrink import FailureSignature, extract_failure_signature
from zharness.hunt.causes import find_cause
from zharness.hunt.draw import Draw, PairCoverage, iter_draws
from zharness.hunt.groups import AlarmGroup, find_explanation, find_group
from zharness.hunt.log import DrawRecord, HuntLog, HuntState
from zharness.hunt.smaller import shrink_program
from zharness.hunt.space import Space
from zharness.run.program_runner import ProgramOutcome, ProgramRunner
from zharness.run.record import Verdict
from zharness.workload.programs import Program
from zharness.world import Isolation

REFUSED = "zharness.errors.ConfigError"  # the engine refuses a combination of options, which is not a failure


@dataclass(frozen=True)
class HuntLimits:
    """The end of a hunt: a time in seconds, or a number of draws, whichever comes first (None: no limit)."""

    seconds: float | None
    draws: int | None


@dataclass
class Hunter:
    """A hunter, which runs the draws of a space on one engine.

    ``find_known(program, outcome)`` returns the place where a failure is recorded, or ''. ``export(group)`` writes the
    script of a group and returns its name and the result of its run. ``report`` shows the progress. ``collect_arcs``
    returns the number of the engine's arcs that were reached for the first time since its last call; 0 if unknown.
    """

    space: Space
    runner: ProgramRunner
    log: HuntLog
    coverage: PairCoverage
    find_known: Callable[[Program, ProgramOutcome], str]
    export: Callable[[AlarmGroup], tuple[str, str]]
    report: Callable[[HuntState], None]
    collect_arcs: Callable[[], int] = int

    def hunt(self, seed: int, limits: HuntLimits) -> None:
        """Run draws after those of the log, until a limit is reached. The alarm of the last draw is still shrunk."""
        deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        done = self.log.state.draw_count
        parents: list[Program] = []  # programs with settings that led to new arcs
        for draw in iter_draws(self.space, seed, self.coverage, parents):
            if draw.number <= done:
                if draw.number in self.log.state.productive_draws:
                    parents.append(draw.program)
                continue
            if limits.draws is not None and draw.number > limits.draws:
                return
            if deadline is not None and time.monotonic() > deadline:
                return
            record = self.run_draw(draw)
            record = replace(record, new_arcs=self.collect_arcs())
            if record.new_arcs:
                parents.append(draw.program)
            self.log.write_draw(record)
            self.report(self.log.state)

    def run_draw(self, draw: Draw) -> DrawRecord:
        """Run one draw in pooled ranks, and find the group of its alarm."""
        begun = time.monotonic()
        outcome = self.run(draw.program)
        group, note = 0, ""
        if outcome.verdict.is_broken:
            fresh = self.run(draw.program, Isolation.FRESH)
            if fresh.verdict.is_broken:
                group, outcome = self.find_or_add_group(draw.program, fresh).number, fresh
            else:
                note = f"{outcome.verdict.value} on ranks that earlier draws had used, not on new ones: {outcome.cause}"
                outcome = fresh
        if outcome.verdict is Verdict.ERROR and REFUSED in outcome.cause:
            outcome = replace(outcome, verdict=Verdict.UNSUPPORTED)
        return DrawRecord(draw.number, draw.program, outcome, time.monotonic() - begun, group, note)

    def run(self, program: Program, isolation: Isolation = Isolation.POOLED) -> ProgramOutcome:
        """Run one program and return its outcome."""
        return self.runner.run(self.space.engine, [program], isolation)

    def find_or_add_group(self, program: Program, outcome: ProgramOutcome) -> AlarmGroup:
        """Return the group of a confirmed alarm. An alarm that no group explains is shrunk first."""
        groups = self.log.state.groups
        cause = find_cause(program, outcome)
        explained = find_explanation(groups, cause, program)
        if explained is not None:
            return explained
        smallest, outcome = self.shrink(program, outcome, cause.signature)
        known_group = find_group(groups, find_cause(smallest, outcome), smallest)
        if known_group is not None:
            return known_group
        group = AlarmGroup(len(groups) + 1, smallest, outcome, self.find_known(smallest, outcome))
        if not group.known:
            group.script, group.script_result = self.export(group)
        self.log.write_group(group)
        return group

    def shrink(
        self, program: Program, outcome: ProgramOutcome, signature: FailureSignature
    ) -> tuple[Program, ProgramOutcome]:
        """Return the smallest program that fails in the same way on new ranks, and its outcome on new ranks.

        If the smallest program fails only on ranks that other programs had used, ``program`` itself is returned.
        """

        def fails_alike(candidate: Program) -> bool:
            """Return whether a smaller program fails with the wanted signature."""
            found = self.run(candidate)
            return signature.can_match(extract_failure_signature(found.verdict, found.cause))

        smallest = shrink_program(self.space, program, outcome.verdict, fails_alike).program
        fresh = self.run(smallest, Isolation.FRESH)
        if signature.can_match(extract_failure_signature(fresh.verdict, fresh.cause)):
            return smallest, fresh
        return program, outcome
