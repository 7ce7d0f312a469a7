"""Run many reproductions on many releases: install each release once, then run several scripts at the same time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass

from tqdm import tqdm

from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.releases import repros
from zharness.releases.launch import CommandGroup
from zharness.releases.prepared_release import PreparedRelease, prepare_release
from zharness.releases.repros import (
    Repro,
    ReproResult,
    ReproVerdict,
    build_result,
    find_repros,
    get_distribution,
    load_catalogue,
)


@dataclass(frozen=True)
class ReproRun:
    """One reproduction and the release on which it is run.

    ``engine`` is the release as the option ``--on`` spells it.
    """

    repro: Repro
    engine: str


def select_runs(identifiers: Sequence[str], run_all: bool, engines: Sequence[str]) -> list[ReproRun]:
    """Return the runs of each named reproduction on the releases ``engines``, or on its default releases.

    The default releases follow from the script's header and are used if ``engines`` is empty. Raises UsageError if no
    reproduction is named, if an id is unknown, or if a named reproduction runs on none of ``engines``.
    """
    if not run_all and not identifiers:
        raise UsageError("no reproduction was named; name one by its issue, as in `zharness repro 7352`, or pass --all")
    named = (
        load_catalogue() if run_all else tuple(repro for identifier in identifiers for repro in find_repros(identifier))
    )
    found = []
    for repro in dict.fromkeys(named):
        texts = select_releases(repro, engines)
        if not texts and not run_all:
            raise UsageError(
                f"reproduction {repro.id} runs on {repro.engine}, not on {', '.join(engines)}; pass --on {repro.engine}"
            )
        found += [ReproRun(repro, text) for text in texts]
    if not found:
        raise UsageError(f"no reproduction runs on {', '.join(engines)}; `zharness list repros` lists all of them")
    return found


def select_releases(repro: Repro, engines: Sequence[str]) -> tuple[str, ...]:
    """Return those of ``engines`` that are releases of the engine of ``repro``.

    If ``engines`` is empty, return the default releases of ``repro``.
    """
    return (
        tuple(dict.fromkeys(text for text in engines if split_release(text)[0] == repro.engine))
        if engines
        else repro.default_releases()
    )


def run_repros(
    runs: Sequence[ReproRun],
    jobs: int | None = None,
    on_result: Callable[[ReproResult], None] | None = None,
    seconds: float = repros.TIMEOUT_SECONDS,
) -> list[ReproResult]:
    """Run all ``runs`` and return their results in the same order, with a progress bar on standard error.

    ``on_result`` is called with each result. Up to ``jobs`` scripts run at the same time (None: one per core), each for
    at most ``seconds``. A run on a release that cannot be installed gets the verdict ``not run``. Raises UsageError if
    no release can be installed.
    """
    environments = prepare_releases(runs)
    errors = [error for error in environments.values() if isinstance(error, UsageError)]
    if len(errors) == len(environments):
        raise errors[0]
    results: dict[ReproRun, ReproResult] = {}
    ended = iter_results(runs, environments, jobs or os.cpu_count() or 1, seconds)
    # The generator is closed explicitly, because the traceback of an exception would keep it and its processes alive.
    with tqdm(total=len(runs), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar, closing(ended):
        for run, result in ended:
            results[run] = result
            if on_result is not None:
                on_result(result)
            bar.set_postfix_str(f"{result.repro.id} on {result.repro.engine} {result.release}", refresh=False)
            bar.update()
    return [results[run] for run in runs]


def prepare_releases(runs: Sequence[ReproRun]) -> dict[str, PreparedRelease | UsageError]:
    """Return the environment of every release in ``runs``, or the error if a release cannot be installed.

    The releases are installed one after the other, so that Ctrl-C ends the installation.
    """
    prepared: dict[str, PreparedRelease | UsageError] = {}
    wanted = {run.engine: get_distribution(run.repro.engine) for run in runs}
    with tqdm(wanted.items(), unit="release", leave=False, disable=not sys.stderr.isatty()) as bar:
        for engine, package in bar:
            bar.set_postfix_str(engine)
            try:
                prepared[engine] = prepare_release(engine, package)
            except UsageError as error:
                prepared[engine] = error
    return prepared


def iter_results(
    runs: Sequence[ReproRun], environments: dict[str, PreparedRelease | UsageError], jobs: int, seconds: float
) -> Generator[tuple[ReproRun, ReproResult], None, None]:
    """Yield each run with its result, in the order in which the runs end.

    If the caller stops the iteration early, the running scripts are ended and no further scripts are started.
    """
    commands = CommandGroup()

    def run_one(run: ReproRun) -> ReproResult:
        environment = environments[run.engine]
        if isinstance(environment, UsageError):
            return build_result(
                run.repro, run.engine, split_release(run.engine)[1] or "", ReproVerdict.NOT_RUN, str(environment)
            )
        return repros.run_repro(run.repro, run.engine, environment, seconds, commands)

    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        futures = {pool.submit(run_one, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        commands.terminate()
        pool.shutdown(wait=True)
