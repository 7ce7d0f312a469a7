"""The commands on releases of engines: repro, releases and bisect."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zharness.cli.cell_options import CellOptions, add_cell_options, reject_cell_options
from zharness.cli.options import INPUT_FILE, OUTPUT, SECONDS, IntegerRange, OnceCommand, add_law_option
from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.run.record import RecordFile


@click.command(cls=OnceCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--all", "every", is_flag=True, help="Run all reproductions, or all reproductions of the engines that --on names."
)
@click.option(
    "--on",
    "--engine",
    "on",
    multiple=True,
    metavar="NAME==RELEASE|NAME@CHECKOUT",
    help="Run on this release, which is installed into a folder of its own, or on this source checkout. NAME alone "
    "means the release that is installed already. May be repeated.",
)
@click.option(
    "--jobs", type=IntegerRange(1), help="Number of scripts to run at the same time; by default one per core."
)
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, help="Time limit for one run, in seconds.")
@click.option("--jsonl", type=OUTPUT, help="Write the result of each run to FILE, as one line of JSON.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table of the verdict of each bug on each release.")
@click.option(
    "--issue",
    is_flag=True,
    help="Run one reproduction without its header and signature, and print a text for an upstream issue: the script, "
    "the expected and the actual output, and versions.",
)
@click.option(
    "--record",
    type=INPUT_FILE,
    metavar="FILE",
    help="With --issue: take the run from FILE, which --jsonl wrote, and run nothing.",
)
def repro(
    ids: tuple[str, ...],
    every: bool,
    on: tuple[str, ...],
    jobs: int | None,
    timeout: float,
    jsonl: Path | None,
    markdown: bool,
    issue: bool,
    record: Path | None,
) -> int:
    """Reproduce real bugs of real engines, named by the number of their issue.

    Each script runs on the releases that its header names: one with the bug and, if it exists, one with the fix. The
    verdict of a run is "reproduced", "not reproduced", or "failed otherwise" if the run failed without showing the
    bug's signature. `zharness list repros` lists the bugs. Each bug has a script in repro/ that also runs under plain
    torchrun.

    Exit codes: 0 every run had the expected verdict, 1 a run had another verdict, 3 the verdict of a run is "failed
    otherwise" or its release could not be installed. With --issue: 0 the text was printed, 1 the bug was not shown.
    """
    from zharness import step_summary
    from zharness.releases import issue_text, repro_runs, repro_table

    if issue:
        if every or jsonl or markdown:
            raise UsageError("--issue prints the text of one reproduction; leave out --all, --jsonl and --markdown")
        return issue_text.print_issue(ids, on, record, timeout)
    if record:
        raise UsageError("--record applies only to --issue")
    runs = repro_runs.select_runs(ids, every, on)
    began = time.monotonic()
    with ExitStack() as stack:
        file = stack.enter_context(_open_record_file(jsonl)) if jsonl else None
        results = repro_runs.run_repros(runs, jobs, file.add if file else None, timeout)
    summary = repro_table.render_summary(results, time.monotonic() - began)
    table = repro_table.render_markdown(results)
    click.echo(table if markdown else f"{repro_table.render_repro_results(results)}\n\n{summary}")
    step_summary.append_section("zharness repro", summary, table)
    return repro_table.exit_code(results)


def _open_record_file(path: Path) -> AbstractContextManager[RecordFile]:
    """Open the file of records.

    This function imports torch, which takes longer than some reproductions. It is called only if records are written.
    """
    from zharness.run.record import open_record_file

    return open_record_file(path)


@click.command(name="releases", cls=OnceCommand)
@click.argument("engine", required=False)
@click.argument("versions", nargs=-1, metavar="[RELEASE|@CHECKOUT]...")
@add_law_option(cell_ids=True)
@click.option("--newest", is_flag=True, help="Also run the newest release on the package index.")
@click.option(
    "--compare-to",
    type=INPUT_FILE,
    metavar="RECORDED.jsonl",
    help="Print what changed since these records, and exit with code 1 if anything changed.",
)
@click.option("--list", "listed", is_flag=True, help="List the releases and checkouts in the cache, and run nothing.")
@click.option(
    "--clean",
    is_flag=True,
    help="Remove the named ENGINE==RELEASE, ENGINE@CHECKOUT or ENGINE from the cache. Without a name, remove all "
    "releases and checkouts, but not the folders that setup_repro.sh made. A run that uses a removed release fails.",
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
    """Run the same cells on several releases of an engine, and report where each cell changed.

    \b
    zharness releases deepspeed 0.16.4 0.18.8 0.19.8 --law 'torch_func.*'
    zharness releases deepspeed 0.19.8 @../DeepSpeed
    zharness releases deepspeed --newest --compare-to RECORDED.jsonl
    zharness releases deepspeed 0.18.8 0.19.8 --mesh tp2 --world-size 4
    zharness releases --list
    zharness releases --clean deepspeed==0.18.8

    On a release that does not claim an axis of the mesh, the cells are unsupported. If no release claims an axis of the
    mesh, the command is refused.

    A broken law does not change the exit code. Exit codes: 0 the cells were run, 1 something changed since the records
    of --compare-to, 2 no release could be run or the records have none of the cells, 3 a release could not be run or
    removed, or the harness itself failed.
    """
    from zharness.releases import cache_entries, cache_table, compare_releases
    from zharness.releases.claimed_meshes import require_mesh_of_any
    from zharness.run.record_reader import load_records

    named = tuple(text for text in (engine, *versions) if text)
    if listed and clean:
        raise UsageError("got both --list and --clean; expected one of them (--list shows what --clean would remove)")
    if listed:
        click.echo(cache_table.render_entries(named))
        return 0
    if clean:
        cleaned = list(cache_entries.clean_cache(named))
        click.echo(cache_table.render_cleaned(cleaned))
        return 0 if all(outcome == cache_entries.REMOVED for _, outcome in cleaned) else 3
    if engine is None:
        raise UsageError(
            "no engine was named; name one, as in `zharness releases deepspeed 0.18.8 0.19.8`, or give --list"
        )
    cell_options = CellOptions(**options)
    request = cell_options.build_request(checks)
    release_names = compare_releases.spell_releases(engine, versions, newest)
    request = require_mesh_of_any(release_names, request)
    recorded = load_records([compare_to]) if compare_to else None
    if recorded is not None and recorded.skipped_lines:
        click.echo(recorded.describe_skipped(), err=True)
    with ExitStack() as stack:
        return compare_releases.run_matrix(
            release_names, request, cell_options.build_measure(stack), recorded.records if recorded is not None else ()
        )


@click.command(cls=OnceCommand)
@click.argument("engine")
@click.argument("check", metavar="LAW")
@click.option("--good", required=True, metavar="RELEASE", help="A release on which the law holds.")
@click.option("--bad", required=True, metavar="RELEASE", help="A release on which the law is broken.")
@add_cell_options
def bisect(engine: str, check: str, good: str, bad: str, **options: Any) -> int:
    """Find the first release on which a law is broken, or, if the good release is newer, on which the law holds again.

    LAW is a law, a glob, a cell id, or the id of a reproduction. A release is bad if a law is broken in any of the
    cells, or if the reproduction shows the bug on that release. Releases that cannot be run, or are neither good nor
    bad, are skipped. Each run halves the remaining range of releases.

    \b
    zharness bisect deepspeed 7913 --good 0.19.8 --bad 0.18.8
    zharness bisect deepspeed torch_func.grad --stage 1 --good 0.19.8 --bad 0.18.8
    zharness bisect deepspeed mesh --stage 1 --mesh tp2 --good 0.19.8 --bad 0.19.4
    """
    from zharness.cli.name_index import require_known_names

    require_known_names(engine_names=[engine])
    from zharness.releases import compare_releases, repros
    from zharness.releases.claimed_meshes import require_mesh_of_any

    cell_options = CellOptions(**options)
    if repros.is_repro_id(check):
        reject_cell_options(check)
        return compare_releases.run_bisect(
            engine, good, bad, compare_releases.make_repro_trial(repros.find_repro(engine, check))
        )
    with ExitStack() as stack:
        request, measure = cell_options.build_request((check,)), cell_options.build_measure(stack)
        for release in (good, bad):
            request = require_mesh_of_any((f"{engine}=={release}",), request)
        trial = compare_releases.make_cell_trial(engine, request, measure)
        return compare_releases.run_bisect(engine, good, bad, trial)
