"""Measure with pytest-benchmark on several ranks: all ranks run the same number of rounds, and one result is reported.

A round takes as long as its slowest rank. The ranks exchange the durations of each round, so that the calibration,
which depends on durations, is the same on all ranks. The exchange itself is not measured.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from zharness.world.current_rank import current_rank, exchange_as

FIXTURES = ("benchmark", "benchmark_weave")


@contextmanager
def sync_benchmarks(item: pytest.Item) -> Iterator[None]:
    """Within the block, make every rank measure the duration of the slowest rank; no effect without a benchmark."""
    module: Any = sys.modules.get("pytest_benchmark.fixture")
    if module is None or not set(FIXTURES) & set(getattr(item, "fixturenames", ())):
        yield
        return
    make_runner, get_precision = module.BenchmarkFixture._make_runner, module.BenchmarkFixture._get_precision
    with pytest.MonkeyPatch.context() as patch:
        # There is no hook between the measurement of a round and the decision about the next one.
        patch.setattr(module.BenchmarkFixture, "_make_runner", lambda *args: wrap_runner(make_runner(*args)))
        patch.setattr(module.BenchmarkFixture, "_get_precision", lambda *args: exchange_maximum(get_precision(*args)))
        yield


def wrap_runner(runner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a round like ``runner``, and returns the duration of the slowest rank."""

    def run(loops_range: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a round: return its duration or, without ``loops_range``, its duration and the function's result."""
        measured = runner(loops_range, *args, **kwargs)
        if loops_range:
            return exchange_maximum(measured)
        duration, result = measured
        return exchange_maximum(duration), result

    return run


def exchange_maximum(seconds: float) -> float:
    """Return the largest value of all ranks. Collective."""
    durations: list[float] = exchange_as("a benchmark", seconds)
    return max(durations)


def take_results(config: pytest.Config) -> tuple[bytes, ...]:
    """Return the results that were measured on rank 0 since the last call, pickled; none on other ranks."""
    session: Any = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return ()
    results, session.benchmarks[:] = [*session.benchmarks], []
    return tuple(map(pickle_result, results)) if current_rank().rank == 0 else ()


def pickle_result(result: Any) -> bytes:
    """Pickle one result of pytest-benchmark without its fixture, and with the number of ranks."""
    plain = copy.copy(result)
    plain.fixture = SimpleNamespace(has_error=result.fixture.has_error)
    plain.extra_info = {**result.extra_info, "ranks": current_rank().world_size}
    try:
        return pickle.dumps(plain)
    except Exception:  # noqa: BLE001 - a parameter of a test may raise anything when it is pickled
        plain.params = {name: repr(value) for name, value in (result.params or {}).items()}
        return pickle.dumps(plain)


def add_results(config: pytest.Config, results: tuple[bytes, ...]) -> None:
    """Add the results of a test on ranks to those of this pytest process, which shows and saves them."""
    for data in results:
        config._benchmarksession.benchmarks.append(pickle.loads(data))  # type: ignore[attr-defined]  # noqa: S301 - of our own rank
