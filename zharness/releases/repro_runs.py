"""Many reproductions on many releases: each release fetched once, then several runs at a time."""

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
from zharness.releases.release_environment import ReleaseEnvironment, prepare_release
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
    """One reproduction on one release, which is spelled as ``--on`` takes it."""

    repro: Repro
    engine: str


def select_runs(identifiers: Sequence[str], run_all: bool, engines: Sequence[str]) -> list[ReproRun]:
    """The runs asked for: of each reproduction on the releases ``on`` of its engine, or on the sides of its header.

    Raises UsageError for an unknown id, where none is asked for, and for one that none of ``on`` is a release of.
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
                f"reproduction {repro.id} is of {repro.engine}, not of {', '.join(engines)}; name it with its engine"
            )
        found += [ReproRun(repro, text) for text in texts]
    if not found:
        raise UsageError(f"no reproduction is of {', '.join(engines)}; `zharness list repros` says what there is")
    return found


def select_releases(repro: Repro, engines: Sequence[str]) -> tuple[str, ...]:
    """Those of ``on`` that are releases of the reproduction's engine, each once; its header's where ``on`` is empty."""
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
    """The results in the order of ``runs``, with progress on standard error; ``finished`` hears each as it comes.

    ``jobs`` runs go on at a time, one for each core where none is given, and each has ``seconds``. A release that
    cannot be had makes its runs ``not run``, and the others go on; raises UsageError when none can be had.
    """
    places = prepare_releases(runs)
    troubles = [found for found in places.values() if isinstance(found, UsageError)]
    if len(troubles) == len(places):
        raise troubles[0]
    found: dict[ReproRun, ReproResult] = {}
    ended = iter_results(runs, places, jobs or os.cpu_count() or 1, seconds)
    # Closed here and now: while an exception is on its way, its traceback would keep the generator, and what it runs.
    with tqdm(total=len(runs), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar, closing(ended):
        for run, result in ended:
            found[run] = result
            if on_result is not None:
                on_result(result)
            bar.set_postfix_str(f"{result.repro.id} on {result.repro.engine} {result.release}", refresh=False)
            bar.update()
    return [found[run] for run in runs]


def prepare_releases(runs: Sequence[ReproRun]) -> dict[str, ReleaseEnvironment | UsageError]:
    """The place of every release, or why it cannot be had. One after the other: an interrupt ends the install."""
    found: dict[str, ReleaseEnvironment | UsageError] = {}
    wanted = {run.engine: get_distribution(run.repro.engine) for run in runs}
    with tqdm(wanted.items(), unit="release", leave=False, disable=not sys.stderr.isatty()) as bar:
        for text, package in bar:
            bar.set_postfix_str(text)
            try:
                found[text] = prepare_release(text, package)
            except UsageError as trouble:
                found[text] = trouble
    return found


def iter_results(
    runs: Sequence[ReproRun], environments: dict[str, ReleaseEnvironment | UsageError], jobs: int, seconds: float
) -> Generator[tuple[ReproRun, ReproResult], None, None]:
    """Results as they come. When the caller stops or is interrupted, what runs is ended and nothing else begins."""
    running = CommandGroup()

    def run_one(run: ReproRun) -> ReproResult:
        found = environments[run.engine]
        if isinstance(found, UsageError):
            return build_result(
                run.repro, run.engine, split_release(run.engine)[1] or "", ReproVerdict.NOT_RUN, str(found)
            )
        return repros.run_repro(run.repro, run.engine, found, seconds, running)

    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        futures = {pool.submit(run_one, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running.terminate()
        pool.shutdown(wait=True)
