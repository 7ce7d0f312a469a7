"""Many reproductions on many releases: each release fetched once, then several runs at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass

from tqdm import tqdm

from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.releases import repros
from zharness.releases.launch import Running
from zharness.releases.place import Place, place
from zharness.releases.repros import Repro, ReproResult, Verdict, blank, catalogue, distribution, find


@dataclass(frozen=True)
class Run:
    """One reproduction on one release, which is spelled as ``--on`` takes it."""

    repro: Repro
    text: str


def chosen(identifiers: Sequence[str], every: bool, on: Sequence[str]) -> list[Run]:
    """The runs asked for: of each reproduction on the releases ``on`` of its engine, or on the sides of its header.

    Raises UsageError for an unknown id, where none is asked for, and for one that none of ``on`` is a release of.
    """
    if not every and not identifiers:
        raise UsageError("no reproduction was named; name one by its issue, as in `zharness repro 7352`, or pass --all")
    named = catalogue() if every else tuple(repro for identifier in identifiers for repro in find(identifier))
    found = []
    for repro in dict.fromkeys(named):
        texts = sides(repro, on)
        if not texts and not every:
            raise UsageError(
                f"reproduction {repro.id} is of {repro.engine}, not of {', '.join(on)}; name it with its engine"
            )
        found += [Run(repro, text) for text in texts]
    if not found:
        raise UsageError(f"no reproduction is of {', '.join(on)}; `zharness list repros` says what there is")
    return found


def sides(repro: Repro, on: Sequence[str]) -> tuple[str, ...]:
    """Those of ``on`` that are releases of the reproduction's engine, each once; its header's where ``on`` is empty."""
    return tuple(dict.fromkeys(text for text in on if split(text)[0] == repro.engine)) if on else repro.sides()


def results(
    runs: Sequence[Run],
    jobs: int | None = None,
    finished: Callable[[ReproResult], None] | None = None,
    seconds: float = repros.SECONDS,
) -> list[ReproResult]:
    """The results in the order of ``runs``, with progress on standard error; ``finished`` hears each as it comes.

    ``jobs`` runs go on at a time, one for each core where none is given, and each has ``seconds``. A release that
    cannot be had makes its runs ``not run``, and the others go on; raises UsageError when none can be had.
    """
    places = fetched(runs)
    troubles = [found for found in places.values() if isinstance(found, UsageError)]
    if len(troubles) == len(places):
        raise troubles[0]
    found: dict[Run, ReproResult] = {}
    ended = run_all(runs, places, jobs or os.cpu_count() or 1, seconds)
    # Closed here and now: while an exception is on its way, its traceback would keep the generator, and what it runs.
    with tqdm(total=len(runs), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar, closing(ended):
        for run, result in ended:
            found[run] = result
            if finished is not None:
                finished(result)
            bar.set_postfix_str(f"{result.repro.id} on {result.repro.engine} {result.release}", refresh=False)
            bar.update()
    return [found[run] for run in runs]


def fetched(runs: Sequence[Run]) -> dict[str, Place | UsageError]:
    """The place of every release, or why it cannot be had. One after the other: an interrupt ends the install."""
    found: dict[str, Place | UsageError] = {}
    wanted = {run.text: distribution(run.repro.engine) for run in runs}
    with tqdm(wanted.items(), unit="release", leave=False, disable=not sys.stderr.isatty()) as bar:
        for text, package in bar:
            bar.set_postfix_str(text)
            try:
                found[text] = place(text, package)
            except UsageError as trouble:
                found[text] = trouble
    return found


def run_all(
    runs: Sequence[Run], places: dict[str, Place | UsageError], jobs: int, seconds: float
) -> Generator[tuple[Run, ReproResult], None, None]:
    """Results as they come. When the caller stops or is interrupted, what runs is ended and nothing else begins."""
    running = Running()

    def one(run: Run) -> ReproResult:
        found = places[run.text]
        if isinstance(found, UsageError):
            return blank(run.repro, run.text, split(run.text)[1] or "", Verdict.NOT_RUN, str(found))
        return repros.run(run.repro, run.text, found, seconds, running)

    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        futures = {pool.submit(one, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running.end()
        pool.shutdown(wait=True)
