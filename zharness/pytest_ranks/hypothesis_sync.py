"""Hypothesis on several ranks: the same examples, one verdict on each, the same minimal failure.

Every rank runs Hypothesis' whole engine. The engines stay in step because they start from one seed, consult no clock,
and are told the same outcome of every example: the ranks exchange what happened on each and decide together.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from zharness.errors import UsageError, WorldError
from zharness.pytest_ranks.rank_text import format_ranks
from zharness.world.current_rank import ExchangeMismatchError, exchange_as

if TYPE_CHECKING:
    from hypothesis import settings

Exchange = Callable[[Any], list[Any]]

MAX_TEXT_LENGTH = 200  # characters of an error or of an example that travel; the rest travels as a digest


class ExampleFailed(AssertionError):
    """An example failed, on some ranks or in several ways. Every rank raises it, from one line and without a cause.

    Hypothesis tells failures apart by type, file, line and the whole chain of contexts: a cause on one rank alone would
    make it another failure there, and the ranks would shrink apart.
    """


class ExamplesDiverged(AssertionError):
    """The ranks no longer run the same examples, so that no verdict on one can be had."""


class _EngineAborted(BaseException):
    """Ends Hypothesis' engine at once: it shrinks what derives from Exception only. ``error`` is what is meant."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class ExampleStatus(Enum):
    """What became of an example on one rank, or (ENDED) that the rank runs no further example."""

    PASSED = "passed"
    REJECTED = "rejected"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    FAILED = "failed"
    STOPPED = "stopped"  # by Hypothesis, in the middle of a draw
    ENDED = "ended"


@dataclass(frozen=True)
class ExampleVerdict:
    """One rank's word on one example: ``origin`` says where it failed, ``scores`` are those given to target()."""

    status: ExampleStatus
    text: str = ""
    origin: object = None
    arguments: str = ""
    choices: str = ""
    scores: dict[str, float] = field(default_factory=dict)


def exchange_with_peers(value: Any) -> list[Any]:
    """Every rank's ``value``, given after an example."""
    return exchange_as("a Hypothesis example", value)


@contextmanager
def sync_examples(item: pytest.Item, exchange: Exchange = exchange_with_peers) -> Iterator[None]:
    """While it is entered, the item's Hypothesis test runs in step with its peers on all ranks.

    Every rank has to enter it, around the call phase of the same item. A no-op for any other item, and while Hypothesis
    has not been imported. The test keeps its own settings and seed as far as they mean the same on every rank; all that
    is changed is put back. Raises UsageError for tests that cannot run so, OutOfStep when the ranks part, and whatever
    ``exchange`` raises when a peer has ended.
    """
    function = _get_hypothesis_test(item)
    if function is None:
        yield
        return
    peers = _Peers(exchange)
    with ExitStack() as replaced:
        for owner, name, value in _list_patches(item, function, peers):
            replaced.enter_context(_patch_attribute(owner, name, value))
        with peers.wait_for_peers_at_end():
            yield


def _get_hypothesis_test(item: pytest.Item) -> Any:
    """The function that @given made of the item's test, if it did."""
    test = getattr(item, "obj", None)
    if "hypothesis" not in sys.modules or test is None:
        return None
    function = getattr(test, "__func__", test)
    if not getattr(function, "is_hypothesis_test", False):  # as hypothesis.is_hypothesis_test, which 6.100 has not
        return None
    if not hasattr(function, "hypothesis"):  # runTest of a RuleBasedStateMachine.TestCase
        raise UsageError(
            f"{item.nodeid} is a stateful Hypothesis test, and those cannot run on several ranks: their steps cannot be"
            " kept in step; write the rules as a @given test that draws a list of steps"
        )
    if inspect.iscoroutinefunction(function.hypothesis.inner_test):
        raise UsageError(f"{item.nodeid} is an async Hypothesis test; on several ranks only plain functions can run")
    # Wrong use of @given yields a function without settings, which says on every rank alike what is wrong.
    return function if hasattr(function, "_hypothesis_internal_use_settings") else None


def _list_patches(item: pytest.Item, function: Any, peers: _Peers) -> Iterator[tuple[Any, str, Any]]:
    """What holds another value while the ranks are in step: owner, name of the attribute, value.

    ``hypothesis.inner_test`` is the documented hook. The rest is private, for want of a public way: @settings may not
    be applied twice, @seed cannot be taken back, and nothing switches off the remaining inputs of the engine that
    differ between ranks. The private names of the function are the same from 6.100 to 6.170.
    """
    from hypothesis.internal.conjecture import engine

    own = function._hypothesis_internal_use_settings
    yield function.hypothesis, "inner_test", _wrap_test_body(function, peers)
    yield function, "_hypothesis_internal_use_settings", _make_synced_settings(own)
    if not _is_seeded(item, function):
        # Fixed rather than fresh: without a database, a failure that is found must be found again by the next run.
        seed = int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:8], "big")
        yield function, "_hypothesis_internal_use_seed", seed
    # The clock that gives up on shrinking; the number of shrinks stays limited.
    yield engine, "MAX_SHRINKING_SECONDS", float("inf")
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        # Newer versions draw constants that they read in the modules imported so far, and not every rank imports all.
        nothing = providers.Constants()
        yield providers, "_get_local_constants", lambda: nothing
        yield providers, "CONSTANTS_CACHE", {}


def _is_seeded(item: pytest.Item, function: Any) -> bool:
    """Whether the examples follow from @seed, ``--hypothesis-seed`` or derandomize: the same on every rank already."""
    return (
        function._hypothesis_internal_use_seed is not None
        or function._hypothesis_internal_use_settings.derandomize
        or item.config.getoption("hypothesis_seed", None) is not None
    )


def _make_synced_settings(test_settings: settings) -> settings:
    """The test's own settings less all that follows from one rank's clock, disk or measurements."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        test_settings,
        database=None,
        deadline=None,
        # The search for a second bug ends ten seconds after the first.
        report_multiple_bugs=False,
        # It goes by the lines that this rank has run.
        phases=[phase for phase in test_settings.phases if phase is not Phase.explain],
        suppress_health_check=[*test_settings.suppress_health_check, HealthCheck.too_slow],
    )


@contextmanager
def _patch_attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """``owner`` has another value under ``name`` for a while. Pooled ranks live on, so it is always put back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _wrap_test_body(function: Any, peers: _Peers) -> Callable[..., Any]:
    """The test's body, with the outcome that all ranks decide on."""
    inner = function.hypothesis.inner_test
    not_drawn = inspect.signature(function).parameters  # self, fixtures, parameters: they may differ between ranks

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Before the body runs, which may change what it was given.
        arguments = _format_arguments({name: value for name, value in kwargs.items() if name not in not_drawn})
        result, error = None, None
        try:
            result = inner(*args, **kwargs)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise  # this rank ends; its peers learn it from the exchange
        except BaseException as caught:  # noqa: BLE001 - it is raised again, below or by all ranks in one form
            error = caught
        example = _get_example_data()
        verdicts = peers.compare(_make_verdict(error, arguments, example))
        _merge_scores(verdicts, example)
        if len({(verdict.status, verdict.origin, verdict.choices) for verdict in verdicts}) > 1:
            _raise_common_outcome(verdicts, _format_test_traceback(error))
        if error is not None:
            # All ranks raise it at the same place. Their own exceptions show the diff, and suit xfail(raises=...).
            raise error
        return result

    return run


class _Peers:
    """The ranks of this test, this one among them."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def compare(self, own_verdict: ExampleVerdict) -> list[ExampleVerdict]:
        """Every rank's verdict on the example that all have just run. Raises _Halt if they have not."""
        __tracebackhide__ = True
        try:
            verdicts = self._exchange_verdicts(own_verdict)
        except WorldError as error:
            raise _EngineAborted(error) from None
        if any(verdict.status is ExampleStatus.ENDED for verdict in verdicts):
            raise _EngineAborted(_make_example_divergence_error(verdicts))
        if len({verdict.arguments for verdict in verdicts}) > 1:
            told = _describe_by_rank(verdicts, lambda verdict: verdict.arguments)
            raise _EngineAborted(
                ExamplesDiverged(
                    f"the ranks drew different examples: {told}\n(the strategy depends on the rank, on time, on"
                    " PYTHONHASHSEED or on what only some ranks have done; or drawing failed on some ranks only)"
                )
            )
        return verdicts

    @contextmanager
    def wait_for_peers_at_end(self) -> Iterator[None]:
        """Wait at the end for all ranks, so that one that ends early is named to those that go on."""
        try:
            yield
        except _EngineAborted as halt:
            # With the traceback as far as the test, rather than this line.
            raise halt.error.with_traceback(halt.__traceback__) from None
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:
            with suppress(WorldError, ExamplesDiverged):
                self._announce_end(f"ended its test with {_summarize_error(error)}")
            raise
        else:
            self._announce_end("ended its test")

    def _announce_end(self, message: str) -> None:
        verdicts = self._exchange_verdicts(ExampleVerdict(ExampleStatus.ENDED, message))
        if any(verdict.status is not ExampleStatus.ENDED for verdict in verdicts):
            raise _make_example_divergence_error(verdicts)

    def _exchange_verdicts(self, verdict: ExampleVerdict) -> list[ExampleVerdict]:
        while True:
            # A peer may be in an exchange of the test's own, which this rank has failed to reach: its verdict follows.
            with suppress(ExchangeMismatchError):
                return self.exchange(verdict)


def _raise_common_outcome(verdicts: list[ExampleVerdict], local_traceback: str) -> NoReturn:
    """Raise on every rank what follows from verdicts that differ: the gravest of them."""
    __tracebackhide__ = True
    import hypothesis

    kinds = {verdict.status for verdict in verdicts}
    astray = ExampleStatus.STOPPED in kinds or len({verdict.choices for verdict in verdicts}) > 1
    error: BaseException | None = None
    if ExampleStatus.FAILED in kinds:
        told = _describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.FAILED)
        error = ExampleFailed(f"{told}\n{_NOT_SHRUNK_NOTE * astray}{local_traceback}".rstrip())
    elif ExampleStatus.XFAILED in kinds:
        error = pytest.xfail.Exception(_describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.XFAILED))
    elif ExampleStatus.SKIPPED in kinds:
        error = pytest.skip.Exception(_describe_by_rank(verdicts, lambda verdict: verdict.text, ExampleStatus.SKIPPED))
    if astray:
        raise _EngineAborted(error or _make_draw_divergence_error(verdicts))
    if error is not None:
        raise error
    hypothesis.reject()


_NOT_SHRUNK_NOTE = (
    "not shrunk: some ranks failed before a draw that the others reached; draw before the ranks' ways part\n"
)


def _make_draw_divergence_error(verdicts: list[ExampleVerdict]) -> ExamplesDiverged:
    told = _describe_by_rank(verdicts, lambda verdict: f"{verdict.status.value} after {verdict.choices}")
    return ExamplesDiverged(f"the ranks drew differently inside the test; draw before their ways part: {told}")


def _make_example_divergence_error(verdicts: list[ExampleVerdict]) -> ExamplesDiverged:
    told = _describe_by_rank(
        verdicts, lambda verdict: verdict.text if verdict.status is ExampleStatus.ENDED else f"ran {verdict.arguments}"
    )
    return ExamplesDiverged(f"the ranks did not run the same examples: {told}")


def _get_example_data() -> Any:
    """What the engine keeps of the running example; no public name leads to it, and its attributes changed names."""
    from hypothesis.control import current_build_context

    return current_build_context().data


def _make_verdict(error: BaseException | None, arguments: str, example: Any) -> ExampleVerdict:
    kind = _classify_error(error)
    origin = _find_error_origin(error) if error is not None and kind is ExampleStatus.FAILED else None
    text = _summarize_error(error) if error is not None else ""
    drawn = getattr(example, "choices", None)  # with those of data(); older versions have a buffer of bytes instead
    choices = _truncate_text(repr(list(getattr(example, "buffer", ()) if drawn is None else drawn)))
    return ExampleVerdict(kind, text, origin, arguments, choices, dict(example.target_observations))


def _merge_scores(verdicts: list[ExampleVerdict], example: Any) -> None:
    """The best score of any rank is every rank's: they steer which examples are varied, without Phase.target too."""
    for verdict in verdicts:
        for label, score in verdict.scores.items():
            example.target_observations[label] = max(score, example.target_observations.get(label, score))


def _classify_error(error: BaseException | None) -> ExampleStatus:
    from hypothesis.errors import StopTest, UnsatisfiedAssumption

    if error is None:
        return ExampleStatus.PASSED
    kinds = {
        StopTest: ExampleStatus.STOPPED,
        UnsatisfiedAssumption: ExampleStatus.REJECTED,
        pytest.skip.Exception: ExampleStatus.SKIPPED,
        unittest.SkipTest: ExampleStatus.SKIPPED,
        pytest.xfail.Exception: ExampleStatus.XFAILED,
    }
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), ExampleStatus.FAILED)


def _find_error_origin(error: BaseException, visited: tuple[BaseException, ...] = ()) -> object:
    """What Hypothesis tells failures apart by: type, file, line, and those of contexts and of a group's members."""
    frames = list(traceback.walk_tb(error.__traceback__))
    place = (frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else None
    visited = (*visited, error)
    others = [error.__context__, *getattr(error, "exceptions", ())]
    inner = [
        _find_error_origin(other, visited)
        for other in others
        if isinstance(other, BaseException) and other not in visited
    ]
    return (f"{type(error).__module__}.{type(error).__qualname__}", place, tuple(inner))


def _format_arguments(drawn_values: dict[str, Any]) -> str:
    shown = ", ".join(f"{name}={_safe_repr(value)}" for name, value in drawn_values.items())
    return _truncate_text(re.sub(r"\b0x[0-9a-fA-F]+", "0x...", shown))  # addresses differ between processes


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - whatever a foreign repr does, the example runs
        return type(value).__qualname__


def _summarize_error(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return _truncate_text(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _truncate_text(text: str) -> str:
    """The text, or its beginning with a digest of the whole: two are equal if and only if the texts are."""
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return f"{text[:MAX_TEXT_LENGTH]}... (sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]})"


def _format_test_traceback(error: BaseException | None) -> str:
    """Where it failed on this rank, from the test's own frame on."""
    if _classify_error(error) is not ExampleStatus.FAILED or error is None or error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))


def _describe_by_rank(
    verdicts: list[ExampleVerdict], get_text: Callable[[ExampleVerdict], str], status: ExampleStatus | None = None
) -> str:
    """Who says what, as in "ranks 0-1, 3: x; rank 2: y"; of all ranks, or of those with one kind of verdict."""
    ranks: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if status in (None, verdict.status):
            ranks.setdefault(get_text(verdict), []).append(rank)
    return "; ".join(f"{format_ranks(those)}: {text}" for text, those in ranks.items())
