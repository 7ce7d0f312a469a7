"""Check several models, engines and configurations in turn: the command ``zharness model``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Protocol

import click

from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run import Record
from zharness.run.check_loop import RunInterrupted, RunOptions, open_optional_record_file
from zharness.run.model_check import ModelCheckRequest, OpenSink, ReportStatus, RunnerLanes, check_model_on
from zharness.run.record import RecordFile
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.workload.user_model import list_factories

REFUSED_EXIT_CODE = 2


class ModelReporter(Protocol):
    """The interface that reports the records of models, implemented by ``zharness.report.model_outputs``."""

    @property
    def jsonl(self) -> Path | None:
        """Return the path of the file that gets one JSON line per cell while cells run, or None if there is no file."""
        ...

    def require_writable(self) -> None:
        """Raise UsageError if a file cannot be read or written. Call this method before a long run."""
        ...

    def report_models(self, records: Sequence[Record], seconds: float, unjudged: Sequence[str]) -> int:
        """Report a finished run and the sentences on what was not judged, and return the exit code."""
        ...


@dataclass(frozen=True)
class ModelMatrix:
    """The models, engines and configuration files; every combination of them is checked in the same way.

    ``models`` are paths of factories, or patterns such as ``package.module:gpt*``. A file with an empty name means no
    configuration. With ``ignore_memory_limit``, models run that do not fit into memory. ``law_set`` is the version of
    the law set, empty for the newest.
    """

    models: tuple[str, ...]
    engines: tuple[str, ...]
    configs: tuple[str, ...] = ("",)
    stages: tuple[int, ...] = ()
    world_size: int = 2
    dtype: str = ""
    steps: int = 3
    only: tuple[str, ...] = ()
    ignore_memory_limit: bool = False
    mesh: Mesh = DEFAULT_MESH
    law_set: str = ""

    def expand(self) -> list[ModelCheckRequest]:
        """Return a request for each combination; the requests of one engine follow each other.

        Raises UsageError for a pattern that no factory matches.
        """
        names = dict.fromkeys(name for model in self.models for name in list_factories(model))
        return [
            ModelCheckRequest(
                name,
                config,
                engine,
                self.stages,
                self.world_size,
                self.dtype,
                self.steps,
                self.only,
                self.ignore_memory_limit,
                self.mesh,
                self.law_set,
            )
            for engine, name, config in product(self.engines, names, self.configs)
        ]


def run_model_matrix(
    matrix: ModelMatrix, options: RunOptions, reporter: ModelReporter, get_environment: GetEnvironment
) -> int:
    """Check every combination, report the records and return the exit code.

    If there is a single combination and it is refused, raises UsageError before the first law runs. If there are
    several, a refused one does not end the others: the exit code is then 2, unless a law fails. On Ctrl-C, the finished
    cells are reported.
    """
    reporter.require_writable()
    requests = matrix.expand()
    began = time.monotonic()
    unjudged: list[str] = []
    refused: list[str] = []
    records: list[Record] = []
    with ExitStack() as stack:
        open_sink = cache(partial(open_optional_record_file, stack, reporter.jsonl))
        finished = 0
        try:
            for request, found in check_models(requests, options, open_sink, get_environment, echo_error, refused):
                finished += 1
                records += found
                reason = explain_uncompared_gradients(found, request.only) if found else ""  # empty if refused
                unjudged += [f"{describe_combination(request, len(requests))}{reason}"] if reason else []
        except KeyboardInterrupt as interrupt:
            records += interrupt.records if isinstance(interrupt, RunInterrupted) else []
            cells = f"{len(records)} cell{'s' * (len(records) != 1)}"
            sentence = f"INTERRUPTED after {cells}; {finished} of {len(requests)} checks of a model came to their end"
            if records:
                reporter.report_models(records, time.monotonic() - began, (*refused, *unjudged, sentence))
            raise
    code = reporter.report_models(records, time.monotonic() - began, (*refused, *unjudged))
    return code or (REFUSED_EXIT_CODE if refused else int(bool(unjudged)))


def check_models(
    requests: Sequence[ModelCheckRequest],
    options: RunOptions,
    open_sink: Callable[[], RecordFile | None],
    get_environment: GetEnvironment,
    report_status: ReportStatus,
    refused: list[str],
) -> Iterator[tuple[ModelCheckRequest, list[Record]]]:
    """Yield each request with its records. The requests of one engine share its rank servers.

    A sentence for each refused request is added to ``refused``; if there is only one request, UsageError is raised
    instead.
    """
    for engine in dict.fromkeys(request.engine for request in requests):
        with RunnerLanes(options, engine, get_environment) as lanes:
            for request in requests:
                if request.engine == engine:
                    yield request, check_or_refuse(lanes, request, open_sink, report_status, refused, len(requests))
                    lanes.close_model(request.model)


def check_or_refuse(
    lanes: RunnerLanes,
    request: ModelCheckRequest,
    open_sink: OpenSink,
    report_status: ReportStatus,
    refused: list[str],
    count: int,
) -> list[Record]:
    """Return the records of one of ``count`` requests; if it is refused, add the reason to ``refused``."""
    try:
        return check_model_on(lanes, request, open_sink, report_status)
    except UsageError as error:
        if count == 1:
            raise
        refused.append(f"REFUSED {describe_combination(request, count)}{error}")
        report_status(refused[-1])
        return []


def describe_combination(request: ModelCheckRequest, count: int) -> str:
    """Return the words that begin a sentence about one of several requests: its model, engine and configuration."""
    if count == 1:
        return ""
    return f"{request.model} on {request.engine}{f' with {request.config}' if request.config else ''}: "


def echo_error(line: str) -> None:
    """Print a line to standard error."""
    click.echo(line, err=True)
