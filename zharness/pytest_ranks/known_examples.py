"""Continue a Hypothesis test on new ranks after an example in which some ranks waited for a rank that had left it.

[Note: an example that a rank leaves]
A rank that leaves an example by an exception or an early return does not reach the collectives in which other ranks
wait. No message can interrupt a collective, and if the ranks closed its connections, process groups of fixtures would
be lost. So the rank server ends all ranks (``world/part_departures.py``), and the pytest process runs the test again,
on new ranks that know the verdicts of all examples so far. Hypothesis draws the same examples again. On a known example
the ranks raise its outcome without running the test's body, also while Hypothesis shrinks, so every example has one
verdict.

If the rank had drawn values in the body of the example, with ``data()``, new ranks can identify the example only after
its body has run. So the example cannot be repeated: the test ends with the outcome of that example, as a failure that
is not shrunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from zharness.pytest_ranks.example_notes import load_example_notes
from zharness.pytest_ranks.example_verdict import ExampleStatus, ExampleVerdict
from zharness.pytest_ranks.phase_report import ExampleNote
from zharness.world import GroupOutcome, RankEnd, RankOutcome
from zharness.world.messages import RankStatus


@dataclass(frozen=True)
class KnownExample:
    """The verdicts of all ranks on one example, in rank order; ``key`` identifies the example by its drawn values."""

    key: str
    verdicts: tuple[ExampleVerdict, ...]

    @property
    def is_failed(self) -> bool:
        """Return whether the example failed on some rank, or some ranks waited for other ranks that had returned."""
        statuses = {verdict.status for verdict in self.verdicts}
        return ExampleStatus.FAILED in statuses or statuses == {ExampleStatus.PASSED, ExampleStatus.BLOCKED}

    @property
    def is_blocked(self) -> bool:
        """Return whether some rank waited forever for a rank that had left the example."""
        return any(verdict.status is ExampleStatus.BLOCKED for verdict in self.verdicts)


@dataclass(frozen=True)
class KnownExamples:
    """The examples that have ended on earlier ranks of the same test.

    If ``rejects_new`` is True, the time to run more examples is over, and unknown examples count as rejected. ``last``
    is an example that new ranks cannot repeat and that therefore ends the test, or None.
    """

    by_key: Mapping[str, KnownExample] = field(default_factory=dict)
    rejects_new: bool = False
    last: KnownExample | None = None

    def find(self, key: str) -> KnownExample | None:
        """Return the example if the test's body does not have to run on it.

        An example that failed without a blocked rank runs again, because Hypothesis identifies the failure by the
        exception itself.
        """
        known = self.by_key.get(key)
        if known is None or (known.is_failed and not known.is_blocked and not self.rejects_new):
            return None
        return known

    def add(self, left: LeftExample) -> KnownExamples:
        """Return these examples together with ``left`` and the examples that ended before ``left``."""
        if not left.can_repeat:
            return replace(self, last=left.example)
        return replace(self, by_key={**self.by_key, **{known.key: known for known in (*left.ended, left.example)}})


NO_EXAMPLES = KnownExamples()
_DEPARTURES = (RankStatus.PART_FAILED, RankStatus.PART_LEFT, RankStatus.PART_ENDED)  # in the order of their precedence


@dataclass(frozen=True)
class LeftExample:
    """An example that some ranks left while others were blocked, and the examples that ended before it.

    ``can_repeat`` says whether its key identifies the example. This is so if no rank that left the example had drawn
    values in the test's body.
    """

    example: KnownExample
    ended: tuple[KnownExample, ...]
    can_repeat: bool


def find_left_example(outcome: GroupOutcome) -> LeftExample | None:
    """Return the example that some ranks left while other ranks were blocked; None if no example was left."""
    if any(rank.end is not RankEnd.STOPPED for rank in outcome.ranks):
        return None
    last_notes = {rank.rank: notes[-1] for rank in outcome.ranks if (notes := load_example_notes(rank))}
    leavers = {rank: note for rank, note in last_notes.items() if note.status is not RankStatus.OK}
    if not leavers:
        return None
    first = min(leavers.values(), key=lambda note: _DEPARTURES.index(note.status))
    verdicts = tuple(
        leavers[rank.rank].verdict if rank.rank in leavers else _describe_blocked_rank(rank, first)
        for rank in outcome.ranks
    )
    can_repeat = all(note.verdict.choices == note.choices_before for note in leavers.values())
    return LeftExample(KnownExample(first.key, verdicts), first.ended_examples, can_repeat)


def _describe_blocked_rank(rank: RankOutcome, left: ExampleNote) -> ExampleVerdict:
    """Return the verdict of a rank that had not ended the example ``left``, in which it drew the same values."""
    text = f"waited in {rank.site}" if rank.site else "had not ended the example"
    return ExampleVerdict(ExampleStatus.BLOCKED, text, None, left.verdict.arguments, left.choices_before)


def run_all_examples(run: Callable[[KnownExamples], GroupOutcome], timeout: float) -> GroupOutcome:
    """Call ``run`` with the known examples until no rank leaves an example while others are blocked.

    After ``timeout`` seconds, the ranks run no further example: Hypothesis then reports the smallest failure so far.
    If no example has failed by then, the returned outcome says that the ranks hung.
    """
    started_at, known = time.monotonic(), NO_EXAMPLES
    first = outcome = run(known)
    while known.last is None and (left := find_left_example(outcome)) is not None:
        known = known.add(left)
        if time.monotonic() > started_at + timeout:
            if known.rejects_new or not any(example.is_failed for example in known.by_key.values()):
                outcome = replace(outcome, ranks=tuple(map(_mark_as_hung, outcome.ranks)))
                break
            known = replace(known, rejects_new=True)
        outcome = run(known)
    if outcome is first:
        return first
    return replace(outcome, previous_outcome=first.previous_outcome, seconds=time.monotonic() - started_at)


def _mark_as_hung(rank: RankOutcome) -> RankOutcome:
    """Turn the outcome of a rank that was stopped into the outcome of a rank that did not finish in time."""
    cause = "ranks left so many examples while others waited that the time was over"
    return replace(rank, end=RankEnd.HUNG, cause=cause)
