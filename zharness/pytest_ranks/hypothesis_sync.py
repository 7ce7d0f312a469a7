"""Run Hypothesis tests on several ranks: all ranks get the same examples, outcomes and minimal failure.

Every rank runs Hypothesis' whole engine. The engines draw the same examples because they start from one seed, do not
depend on clocks, and see the same outcome of every example: the ranks exchange their verdicts on each example, and all
raise the same outcome.

If a rank leaves an example by an exception, its peers may wait forever in a collective. The rank sends a note of its
exception, and the test continues on new ranks (``known_examples.py``).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from zharness.errors import UsageError, WorldError
from zharness.pytest_ranks.example_notes import choose_departure, note_while_waiting
from zharness.pytest_ranks.example_verdict import (
    ExampleStatus,
    ExampleVerdict,
    describe_by_rank,
    describe_departure,
    format_arguments,
    format_choices,
    make_verdict,
    summarize_error,
)
from zharness.pytest_ranks.known_examples import NO_EXAMPLES, KnownExample, KnownExamples
from zharness.pytest_ranks.phase_report import ExampleNote
from zharness.world.current_rank import ExchangeMismatchError, exchange_as

if TYPE_CHECKING:
    from hypothesis import settings

Exchange = Callable[[Any], list[Any]]


class ExampleFailed(AssertionError):
    """A Hypothesis example failed on some ranks only, or failed differently on several ranks.

    All ranks raise this error without a cause. Hypothesis identifies a failure by the type, file and line of the error
    and of its chain of contexts. If only one rank had a cause, that rank would identify a different failure than the
    other ranks and shrink to a different example.
    """


class ExamplesDiverged(AssertionError):
    """The ranks do not run the same examples, so their verdicts cannot be combined."""


class _EngineAborted(BaseException):
    """An exception that aborts Hypothesis' engine without shrinking.

    Hypothesis shrinks only for subclasses of Exception. The code that calls Hypothesis' engine catches this
    exception and raises ``error`` instead.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def exchange_with_peers(value: Any) -> list[Any]:
    """Return the ``value`` of every rank, in rank order.

    Every rank has to call this function after the same example.
    """
    return exchange_as("a Hypothesis example", value)


@contextmanager
def sync_examples(
    item: pytest.Item, exchange: Exchange = exchange_with_peers, known: KnownExamples = NO_EXAMPLES
) -> Iterator[None]:
    """Keep the Hypothesis test of ``item`` synchronized with the other ranks while the block runs.

    Every rank has to enter this block around the call phase of the same item. The block has no effect if the item is
    not a Hypothesis test. The test's body does not run on ``known`` examples. The test keeps only the settings that
    have the same effect on every rank. All patches are undone at the end of the block. Raises UsageError for a kind of
    test that cannot run on several ranks, ExamplesDiverged if the ranks draw different examples, and the error of
    ``exchange`` if another rank has ended.
    """
    function = _get_hypothesis_test(item)
    if function is None:
        yield
        return
    peers = _Peers(exchange, known)
    with ExitStack() as patches:
        for owner, name, value in _list_patches(item, function, peers):
            patches.enter_context(_patch_attribute(owner, name, value))
        with peers.wait_for_peers_at_end():
            yield


def _get_hypothesis_test(item: pytest.Item) -> Any:
    """Return the function that ``@given`` made of the item's test, or None if the item is not a Hypothesis test.

    Raises UsageError for a kind of Hypothesis test that cannot run on several ranks.
    """
    test = getattr(item, "obj", None)
    if "hypothesis" not in sys.modules or test is None:
        return None
    function = getattr(test, "__func__", test)
    if not getattr(function, "is_hypothesis_test", False):  # hypothesis.is_hypothesis_test does not exist in 6.100
        return None
    if not hasattr(function, "hypothesis"):  # runTest of a RuleBasedStateMachine.TestCase
        raise UsageError(
            f"{item.nodeid} is a stateful Hypothesis test, which cannot run on several ranks because its steps cannot "
            "be synchronized; write the rules as a @given test that draws a list of steps"
        )
    if inspect.iscoroutinefunction(function.hypothesis.inner_test):
        raise UsageError(f"{item.nodeid} is an async Hypothesis test; on several ranks only plain functions can run")
    # Wrong use of @given yields a function without a seed; calling it raises the same clear error on every rank.
    return function if hasattr(function, "_hypothesis_internal_use_seed") else None


def _list_patches(item: pytest.Item, function: Any, peers: _Peers) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes to patch for the duration of the test: owner, attribute name, new value.

    ``hypothesis.inner_test`` is the documented hook. The other names are private, because Hypothesis has no public way
    to apply @settings twice, to undo @seed, or to switch off the inputs that its engine generates differently on each
    rank. The private names that this function patches are the same from Hypothesis 6.100 to 6.170.
    """
    from hypothesis.internal.conjecture import engine

    test_settings = function._hypothesis_internal_use_settings
    yield function.hypothesis, "inner_test", _wrap_test_body(function, peers)
    yield function, "_hypothesis_internal_use_settings", _make_synced_settings(test_settings)
    if not _is_seeded(item, function):
        # The seed is fixed, not random: without a database, the next run has to find a failure again by itself.
        seed = int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:8], "big")
        yield function, "_hypothesis_internal_use_seed", seed
    # The time limit of shrinking depends on the clock of each rank; the limit on the number of shrinks remains.
    yield engine, "MAX_SHRINKING_SECONDS", float("inf")
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        # Newer versions draw constants from the imported modules, which may differ between ranks.
        no_constants = providers.Constants()
        yield providers, "_get_local_constants", lambda: no_constants
        yield providers, "CONSTANTS_CACHE", {}


def _is_seeded(item: pytest.Item, function: Any) -> bool:
    """Return whether @seed, ``--hypothesis-seed`` or derandomize already makes the examples equal on every rank."""
    return (
        function._hypothesis_internal_use_seed is not None
        or function._hypothesis_internal_use_settings.derandomize
        or item.config.getoption("hypothesis_seed", None) is not None
    )


def _make_synced_settings(test_settings: settings) -> settings:
    """Return a copy of the test's settings without those whose effect depends on the rank's clock, disk or coverage."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        test_settings,
        database=None,
        deadline=None,
        # Hypothesis searches for a second bug for ten seconds of wall-clock time, which differ between ranks.
        report_multiple_bugs=False,
        # The explain phase depends on the lines that this rank has run.
        phases=[phase for phase in test_settings.phases if phase is not Phase.explain],
        suppress_health_check=[*test_settings.suppress_health_check, HealthCheck.too_slow],
    )


@contextmanager
def _patch_attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute until the block ends, then restore it, because pooled ranks run more tests afterwards."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrap_test_body(function: Any, peers: _Peers) -> Callable[..., Any]:
    """Return a function that runs the test's body and gives each example the same outcome on every rank."""
    inner = function.hypothesis.inner_test
    not_drawn = inspect.signature(function).parameters  # self, fixtures and parameters may differ between ranks

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the test's body on one example, exchange the verdicts of all ranks, and raise the common outcome."""
        __tracebackhide__ = True
        # Format the arguments before the body runs, because it may modify them.
        arguments = format_arguments({name: value for name, value in kwargs.items() if name not in not_drawn})
        example = _get_example_data()
        before = format_choices(example)
        key = f"{arguments} {before}"
        if peers.known.last is not None:
            raise _EngineAborted(_make_left_after_draw_error(peers.known.last))
        if peers.known.rejects_new or peers.known.find(key) is not None:
            return _repeat_outcome(peers.known, key, example)
        result, error = None, None
        try:
            result = inner(*args, **kwargs)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise  # the exchange of the other ranks fails when this rank has ended
        except BaseException as caught:  # noqa: BLE001 - raised again below, or as the common outcome
            error = caught
        verdict = make_verdict(error, arguments, example)
        summary = summarize_error(error) if error is not None else ""
        departure = choose_departure(verdict.status)
        with note_while_waiting(ExampleNote(departure, verdict, key, before, summary, tuple(peers.ended_examples))):
            verdicts = peers.compare(verdict)
        if verdict.choices == before:  # a body that draws values has to run again
            peers.ended_examples.append(KnownExample(key, tuple(verdicts)))
        _merge_scores(verdicts, example)
        if len({(verdict.status, verdict.origin, verdict.choices) for verdict in verdicts}) > 1:
            _raise_common_outcome(verdicts)
        if error is not None:
            # All ranks raise the same error. Raise the original, which shows the diff and matches xfail(raises=...).
            raise error
        return result

    return run


class _Peers:
    """All ranks of the test; this rank exchanges its verdicts with the other ranks through this object."""

    def __init__(self, exchange: Exchange, known: KnownExamples) -> None:
        self.exchange = exchange
        self.known = known
        self.ended_examples: list[KnownExample] = []

    def compare(self, own_verdict: ExampleVerdict) -> list[ExampleVerdict]:
        """Return every rank's verdict on the example. Raises _EngineAborted if the ranks ran different examples."""
        __tracebackhide__ = True
        try:
            verdicts = self._exchange_verdicts(own_verdict)
        except WorldError as error:
            raise _EngineAborted(error) from None
        if any(verdict.status is ExampleStatus.ENDED for verdict in verdicts):
            raise _EngineAborted(_make_example_divergence_error(verdicts))
        if len({verdict.arguments for verdict in verdicts}) > 1:
            by_rank = describe_by_rank(verdicts, lambda verdict: verdict.arguments)
            raise _EngineAborted(
                ExamplesDiverged(
                    f"the ranks drew different examples: {by_rank}\n(the strategy depends on the rank, on time, on"
                    " PYTHONHASHSEED or on state that differs between ranks; or drawing failed on some ranks only)"
                )
            )
        return verdicts

    @contextmanager
    def wait_for_peers_at_end(self) -> Iterator[None]:
        """Wait for all ranks at the end of the block.

        If a rank ends early, the other ranks raise an error that names that rank. Raises ExamplesDiverged if another
        rank still runs examples.
        """
        try:
            yield
        except _EngineAborted as abort:
            # Keep the traceback of the abort, which shows the test, instead of a traceback that starts at this line.
            raise abort.error.with_traceback(abort.__traceback__) from None
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:
            with suppress(WorldError, ExamplesDiverged):
                self._announce_end(f"ended its test with {summarize_error(error)}")
            raise
        else:
            self._announce_end("ended its test")

    def _announce_end(self, message: str) -> None:
        """Send the status ENDED to the other ranks. Raises ExamplesDiverged if another rank still runs examples."""
        verdicts = self._exchange_verdicts(ExampleVerdict(ExampleStatus.ENDED, message))
        if any(verdict.status is not ExampleStatus.ENDED for verdict in verdicts):
            raise _make_example_divergence_error(verdicts)

    def _exchange_verdicts(self, verdict: ExampleVerdict) -> list[ExampleVerdict]:
        """Send this rank's verdict to the other ranks, and return every rank's verdict, in rank order."""
        while True:
            # A peer may wait in an exchange of the test itself, which this rank failed to reach. That exchange fails
            # with a mismatch, and the peer's verdict follows.
            with suppress(ExchangeMismatchError):
                return self.exchange(verdict)


def _repeat_outcome(known: KnownExamples, key: str, example: Any) -> None:
    """Raise the outcome that the running example had on earlier ranks; reject an example that is not known."""
    __tracebackhide__ = True
    import hypothesis

    found = known.find(key)
    if found is None:
        hypothesis.reject()
    verdicts = list(found.verdicts)
    _merge_scores(verdicts, example)
    if any(verdict.status is not ExampleStatus.PASSED for verdict in verdicts):
        _raise_common_outcome(verdicts, _TIME_OVER_NOTE * known.rejects_new)


def _raise_common_outcome(verdicts: list[ExampleVerdict], note: str = "") -> NoReturn:
    """Raise the same outcome on every rank when their verdicts differ; ``note`` is added to a failure.

    FAILED on any rank takes precedence over XFAILED, SKIPPED and REJECTED, in this order. If some ranks were BLOCKED
    and all others PASSED, the example has failed: some ranks returned while others waited for them.
    """
    __tracebackhide__ = True
    import hypothesis

    statuses = {verdict.status for verdict in verdicts}
    drew_differently = ExampleStatus.STOPPED in statuses or len({verdict.choices for verdict in verdicts}) > 1
    error: BaseException | None = None
    if statuses == {ExampleStatus.PASSED, ExampleStatus.BLOCKED}:
        error = ExampleFailed(f"{describe_by_rank(verdicts, describe_departure)}\n{note}".rstrip())
    elif ExampleStatus.FAILED in statuses:
        by_rank = describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.FAILED)
        blocked = describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.BLOCKED)
        tracebacks = {verdict.text: verdict.traceback for verdict in verdicts if verdict.status is ExampleStatus.FAILED}
        notes = f"{blocked}\n" * bool(blocked) + _NOT_SHRUNK_NOTE * drew_differently + note
        error = ExampleFailed(f"{by_rank}\n{notes}{''.join(tracebacks.values())}".rstrip())
    elif ExampleStatus.XFAILED in statuses:
        error = pytest.xfail.Exception(describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.XFAILED))
    elif ExampleStatus.SKIPPED in statuses:
        error = pytest.skip.Exception(describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.SKIPPED))
    if drew_differently:
        raise _EngineAborted(error or _make_draw_divergence_error(verdicts))
    if error is not None:
        raise error
    hypothesis.reject()


_NOT_SHRUNK_NOTE = (
    "not shrunk: some ranks failed before a draw that other ranks reached; "
    "draw before code that differs between ranks\n"
)


_TIME_OVER_NOTE = "perhaps not the smallest failure: the time of the test was over before Hypothesis had shrunk it\n"


_LEFT_AFTER_DRAW_NOTE = (
    "not shrunk: a rank left an example in which it had drawn values inside the test, while other ranks waited; such "
    "an example cannot be repeated on new ranks; draw in the arguments of @given, or use assert_together"
)


def _make_left_after_draw_error(example: KnownExample) -> ExampleFailed:
    """Make the error for an example that ranks left after a draw inside the test, while other ranks waited."""
    verdicts = list(example.verdicts)
    left = [verdict for verdict in verdicts if verdict.status is not ExampleStatus.BLOCKED]
    by_rank = "; ".join(
        described
        for status in dict.fromkeys(verdict.status for verdict in (*left, *verdicts))
        if (described := describe_by_rank(verdicts, describe_departure, status))
    )
    tracebacks = "".join({verdict.text: verdict.traceback for verdict in left}.values())
    return ExampleFailed(f"{by_rank}\ndrawn: {left[0].choices}\n{_LEFT_AFTER_DRAW_NOTE}\n{tracebacks}".rstrip())


def _make_draw_divergence_error(verdicts: list[ExampleVerdict]) -> ExamplesDiverged:
    """Make the error for ranks that drew different values inside the test's body."""
    by_rank = describe_by_rank(verdicts, lambda verdict: f"{verdict.status.value} after {verdict.choices}")
    return ExamplesDiverged(
        f"the ranks drew different values inside the test; draw before code that differs between ranks: {by_rank}"
    )


def _make_example_divergence_error(verdicts: list[ExampleVerdict]) -> ExamplesDiverged:
    """Make the error for a test that has ended on some ranks while other ranks run another example."""
    by_rank = describe_by_rank(
        verdicts, lambda verdict: verdict.text if verdict.status is ExampleStatus.ENDED else f"ran {verdict.arguments}"
    )
    return ExamplesDiverged(f"the ranks did not run the same examples: {by_rank}")


def _get_example_data() -> Any:
    """Return the ConjectureData of the running example, an internal object of Hypothesis without a public API."""
    from hypothesis.control import current_build_context

    return current_build_context().data


def _merge_scores(verdicts: list[ExampleVerdict], example: Any) -> None:
    """For each label of ``target()``, give every rank the highest score of any rank.

    Scores determine which examples Hypothesis' engine varies next, so the scores have to be equal on all ranks.
    """
    for verdict in verdicts:
        for label, score in verdict.scores.items():
            example.target_observations[label] = max(score, example.target_observations.get(label, score))
