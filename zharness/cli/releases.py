"""The commands about releases of engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zharness.cli.options import OUTPUT, SECONDS, parse_integer_option, parse_name_option
from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.releases.history import RunRequest
    from zharness.run import Record, Request
    from zharness.run.expected_failures import ExpectedFailure
    from zharness.run.record import RecordFile


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "every", is_flag=True, help="Run every reproduction there is; with --on those of its engines.")
@click.option(
    "--on",
    "--engine",
    "on",
    multiple=True,
    metavar="NAME==RELEASE|NAME@CHECKOUT",
    help="A release, installed into a folder of its own, or a source checkout; NAME alone is the installed release. "
    "May be repeated.",
)
@click.option("--jobs", type=click.IntRange(1), help="Runs at a time; one for each core.")
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, help="For one run.")
@click.option("--jsonl", type=OUTPUT, help="Write one JSON line for each run.")
@click.option("--markdown", is_flag=True, help="Print bugs x releases as a table in Markdown.")
def repro(
    ids: tuple[str, ...],
    every: bool,
    on: tuple[str, ...],
    jobs: int | None,
    timeout: float,
    jsonl: Path | None,
    markdown: bool,
) -> int:
    """Show real bugs of real engines, by the number of their issue.

    Each runs on the sides that its header names: a release with the bug, and where there is one a release with the fix.
    The verdict is reproduced, not reproduced or failed otherwise, by the error's signature. `zharness list repros` says
    which there are; each is a script in repro/ that runs under plain torchrun too.

    Exit codes: 0 every release showed what it should, 1 one did not, 3 a run failed otherwise or its release could not
    be had.
    """
    from zharness import step_summary
    from zharness.releases import repro_runs, repro_table

    runs = repro_runs.select_runs(ids, every, on)
    began = time.monotonic()
    with ExitStack() as stack:
        file = stack.enter_context(_open_record_file(jsonl)) if jsonl else None
        found = repro_runs.run_repros(runs, jobs, file.add if file else None, timeout)
    if markdown:
        click.echo(repro_table.render_markdown(found))
    else:
        click.echo(
            f"{repro_table.render_repro_results(found)}\n\n{repro_table.render_summary(found, time.monotonic() - began)}"
        )
    step_summary.append_section(
        "zharness repro",
        repro_table.render_summary(found, time.monotonic() - began),
        repro_table.render_markdown(found),
    )
    return repro_table.exit_code(found)


def _open_record_file(path: Path) -> AbstractContextManager[RecordFile]:
    """The file of records; apart, as torch comes with it, which takes longer to import than some bugs to show."""
    from zharness.run.record import open_record_file

    return open_record_file(path)


def add_cell_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options that say which cells are run, and how, on every release."""
    options = (
        click.option(
            "--stage", "stages", callback=parse_integer_option, metavar="0,1,2,3", help="ZeRO stages; all there are."
        ),
        click.option(
            "--world-size",
            "world_sizes",
            callback=parse_integer_option,
            default="2",
            show_default=True,
            metavar="1,2,4",
        ),
        click.option(
            "--dtype", "dtypes", callback=parse_name_option, default="fp32", show_default=True, metavar="fp32,bf16"
        ),
        click.option(
            "--model", "models", callback=parse_name_option, metavar="NAME,...", help="Models of the workload; all."
        ),
        click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="For the ranks of one cell."),
        click.option(
            "--isolation",
            type=click.Choice(["fresh", "pooled"]),
            default="pooled",
            show_default=True,
            help="New ranks for every cell, or ranks that live on for the cells of one release and stage.",
        ),
        click.option(
            "--jobs", type=click.IntRange(1), help="Cells at a time; one for each core, and then on that core alone."
        ),
        click.option("--jsonl", type=OUTPUT, help="Write one JSON line for each cell."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class CellOptions:
    """What those options gave."""

    stages: tuple[int, ...]
    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    models: tuple[str, ...]
    timeout: float
    isolation: str
    jobs: int | None
    jsonl: Path | None

    def build_request(self, patterns: tuple[str, ...]) -> Request:
        """The cells, of an engine that is filled in later.

        Raises UsageError for what does not exist: a mistake is told before any release is fetched.
        """
        from zharness.run import Request
        from zharness.run.plan import validate_request

        request = Request(patterns, (), self.stages, self.world_sizes, self.dtypes, self.models)
        validate_request(request)
        return request

    def build_measure(self, stack: ExitStack, user_failures: tuple[ExpectedFailure, ...] = ()) -> RunRequest:
        """Runs the cells of a request; all records go to one file, which is closed with ``stack``.

        Excuses that match nothing are told on standard error, each once.
        """
        from zharness.releases.rank_environment import get_release_environment
        from zharness.run.check_loop import RunOptions, open_optional_record_file, run_request
        from zharness.world import Isolation

        options = RunOptions(
            self.timeout, jobs=self.jobs or 0, isolation=Isolation(self.isolation), user_expected_failures=user_failures
        )
        sink = cache(partial(open_optional_record_file, stack, self.jsonl))
        tell = cache(partial(click.echo, err=True))

        def measure(request: Request) -> list[Record]:
            records, complaints = run_request(request, options, sink, get_release_environment)
            for complaint in complaints:
                tell(f"UNMATCHED {complaint}")
            return records

        return measure


def reject_cell_options(identifier: str) -> None:
    """Raises UsageError where the current command was given options that say which cells are run, and how."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in {field.name for field in fields(CellOptions)}
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"got {', '.join(given)} for reproduction {identifier}, which has no cells; leave them out, or name a check"
        )


@click.command(name="releases")
@click.argument("engine", required=False)
@click.argument("versions", nargs=-1, metavar="[RELEASE|@CHECKOUT]...")
@click.option("--check", "checks", multiple=True, help="A check, a group, a glob or a case id; may be repeated.")
@click.option("--newest", is_flag=True, help="The newest release on the index, too.")
@click.option(
    "--compare-to",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="RECORDED.jsonl",
    help="Print what changed since this record, and exit with 1 when anything did.",
)
@click.option("--list", "listed", is_flag=True, help="Print what the cache holds, and run nothing.")
@click.option(
    "--clean",
    is_flag=True,
    help="Remove from the cache ENGINE==RELEASE, ENGINE@CHECKOUT, ENGINE, or every release and all kept of checkouts "
    "(not what setup_repro.sh made). What runs on them at the moment breaks.",
)
@add_cell_options
def releases(
    engine: str | None,
    versions: tuple[str, ...],
    checks: tuple[str, ...],
    newest: bool,
    compare_to: Path | None,
    listed: bool,
    clean: bool,
    **options: Any,
) -> int:
    """Run the same cells on several releases of an engine, and say where each cell flipped.

    \b
    zharness releases deepspeed 0.16.4 0.18.8 0.19.8 --check 'torch_func.*'
    zharness releases deepspeed 0.19.8 @../DeepSpeed
    zharness releases deepspeed --newest --compare-to RECORDED.jsonl
    zharness releases --list
    zharness releases --clean deepspeed==0.18.8

    Broken laws are what it reports, not what it fails on. Exit codes: 0, 1 something changed since the record, 2 no
    release could be run or the record has none of the cells, 3 some could not be run, or not be removed, or the harness
    itself failed.
    """
    from zharness.releases import cache_entries, cache_table, compare_releases
    from zharness.run.record_reader import load_records

    named = tuple(text for text in (engine, *versions) if text)
    if listed and clean:
        raise UsageError("got --list and --clean; --list says what --clean would remove: name one of them")
    if listed:
        click.echo(cache_table.render_entries(named))
        return 0
    if clean:
        done = list(cache_entries.clean_cache(named))
        click.echo(cache_table.render_cleaned(done))
        return 0 if all(what == cache_entries.REMOVED for _, what in done) else 3
    if engine is None:
        raise UsageError("no engine was named; try: zharness releases deepspeed 0.18.8 0.19.8, or --list")
    axes_ = CellOptions(**options)
    request = axes_.build_request(checks)
    texts = compare_releases.spell_releases(engine, versions, newest)
    recorded = load_records([compare_to]) if compare_to else None
    if recorded is not None and recorded.skipped_lines:
        click.echo(recorded.describe_skipped(), err=True)
    with ExitStack() as stack:
        return compare_releases.run_matrix(
            texts, request, axes_.build_measure(stack), recorded.records if recorded is not None else ()
        )


@click.command()
@click.argument("engine")
@click.argument("check")
@click.option("--good", required=True, metavar="RELEASE", help="A release on which the law holds.")
@click.option("--bad", required=True, metavar="RELEASE", help="A release on which it is broken.")
@add_cell_options
def bisect(engine: str, check: str, good: str, bad: str, **options: Any) -> int:
    """Find the first release on which a law is broken, or, where the good release is the newer, holds again.

    CHECK is a check, a glob, or a case id; a release is bad when any of its cells is broken. Or it is the id of a
    reproduction; a release is bad when it is reproduced there. Releases that cannot be run, or show neither, are
    stepped over. As many runs as halving takes.

    \b
    zharness bisect deepspeed 7913 --good 0.19.8 --bad 0.18.8
    zharness bisect deepspeed torch_func.grad --stage 1 --good 0.19.8 --bad 0.18.8
    """
    from zharness.releases import compare_releases, repros

    chosen = CellOptions(**options)
    if repros.is_repro_id(check):
        reject_cell_options(check)
        return compare_releases.run_bisect(
            engine, good, bad, compare_releases.make_repro_trial(repros.find_repro(engine, check))
        )
    with ExitStack() as stack:
        cells = compare_releases.make_cell_trial(engine, chosen.build_request((check,)), chosen.build_measure(stack))
        return compare_releases.run_bisect(engine, good, bad, cells)


@click.command()
@click.argument("base")
@click.argument("change")
@click.option("--check", "checks", multiple=True, help="A check, a group, a glob or a case id; all. May be repeated.")
@click.option("--excuses", multiple=True, type=OUTPUT, help="Expected failures of the change (TOML); may be repeated.")
@add_cell_options
def compare(base: str, change: str, checks: tuple[str, ...], excuses: tuple[Path, ...], **options: Any) -> int:
    """Run the same cells on a base and on a change of it, and fail on what the change broke, on nothing else.

    Both are NAME@CHECKOUT, NAME==RELEASE or NAME. What the change breaks is run once more on both, and counts when it
    breaks again. Exit codes: 0, 1 the change breaks what is not broken on the base, 2 one of them cannot be run or they
    share no cell, 3 the harness itself failed.

    \b
    zharness compare deepspeed@base deepspeed@change --excuses ci/excuses.toml
    """
    from zharness.releases import compare_releases
    from zharness.releases.rank_environment import get_release_environment
    from zharness.run.expected_failures import read_expected_failures

    chosen, own = CellOptions(**options), read_expected_failures(excuses)
    request = chosen.build_request(checks)
    for text in (base, change):
        get_release_environment(text)  # whatever cannot be had is told before the other has run for a minute
    with ExitStack() as stack:
        return compare_releases.compare_releases(base, change, request, chosen.build_measure(stack, own), own)
