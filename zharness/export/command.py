"""`zharness export`: a cell is run, written as a script, and the script run in its turn."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from tabulate import tabulate
from tqdm import tqdm

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.export.cell_script import is_judged_by_law, render_cell_script
from zharness.export.law_steps import explain_long_script
from zharness.export.program_script import has_short_script, render_program_script
from zharness.export.script_writer import Script
from zharness.export.shrink import ShrinkResult
from zharness.export.shrink import shrink_failure as smallest
from zharness.export.verify import RunScript, describe_verification, is_faithful
from zharness.laws import LAWS, get_law
from zharness.run.files import require_writable, write_atomically
from zharness.run.plan import plan_named_cell
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.world.server import RankEnvironment

GetEnvironment = Callable[[str], RankEnvironment]
EXPORTABLE_VERDICTS = (Verdict.PASS, Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT)


@dataclass(frozen=True)
class ExportOptions:
    """The salt of the seed, seconds for the ranks of the cell, and where the script goes; None: standard output."""

    seed: int = 0
    timeout: float = 60.0
    output: Path | None = None


def export(text: str, options: ExportOptions, get_environment: GetEnvironment, run_script: RunScript | None) -> int:
    """Write the script of the cell that ``text`` names; 1 where it was run and does not show the cell's verdict.

    ``run`` runs a script to its end; None leaves that out. Raises UsageError for a cell of which there is no script.
    """
    case = Cell.parse(text)
    get_law(case.law)
    if options.output is not None:
        require_writable(options.output)
    with show_progress("runs the cell"):
        record, claims = run_exported_cell(case, options, get_environment)
    if record.verdict not in EXPORTABLE_VERDICTS:
        raise UsageError(f"cannot export {case.id}: its verdict is {record.verdict.value}: {record.cause}")
    name = options.output.name if options.output is not None else "script.py"
    return write_and_verify(render_cell_script(record, claims, name), record, options.output, run_script)


def write_and_verify(script: Script, record: Record, output: Path | None, run_script: RunScript | None) -> int:
    """Write the script of ``record``, and run it; 1 where it does not show the record's verdict."""
    write_script_text(script.text, output)
    if run_script is None:
        click.echo("not run, so that it shows the cell is not known", err=True)
        return 0
    with tempfile.TemporaryDirectory() as folder, show_progress("runs the script"):
        path = Path(folder) / "script.py"
        path.write_text(script.text, encoding="utf-8")
        shown = run_script(path)
    click.echo(describe_verification(record, shown), err=True)
    return int(not is_faithful(record, shown))


def run_exported_cell(
    cell: Cell, options: ExportOptions, get_environment: GetEnvironment
) -> tuple[Record, Capabilities]:
    """The cell's record, and what its engine claims. Raises UsageError for one that is not run."""
    with Runner({cell.engine: get_environment(cell.engine)}, options.timeout, options.seed) as runner:
        planned = plan_named_cell(cell, runner.claims)
        if planned.unsupported_reason:
            raise UsageError(f"{cell.id} is not run: {planned.unsupported_reason}")
        return runner.run(planned), runner.claims(cell.engine, cell.stage)


def write_script_text(text: str, output: Path | None) -> None:
    """The script where it was asked for."""
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(text, output)


def show_progress(description: str) -> AbstractContextManager[object]:
    """A line on standard error while something takes seconds; silent where nobody watches."""
    return tqdm(total=1, desc=description, bar_format="{desc}: {elapsed}", leave=False, disable=not sys.stderr.isatty())


def render_law_table() -> str:
    """Every law, and what its script is: the shorter the better to send."""
    rows = [(name, describe_script_length(explain_long_script(check, "fp32"))) for name, check in LAWS.items()]
    return tabulate(rows, headers=("law", "script"), tablefmt="simple", disable_numparse=True)


def describe_script_length(reason: str) -> str:
    """In words what a script is, by the reason why it is a long one."""
    return f"long, with the law's own judge: {reason}" if reason else "short"


def shrink(
    text: str,
    options: ExportOptions,
    seconds: float,
    get_environment: GetEnvironment,
    get_run_script: Callable[[str], RunScript] | None,
) -> int:
    """Print the smallest that fails as the cell that ``text`` names does, and write its script.

    That of the program, unless the cell alone has a short one. ``run(engine)`` runs scripts. Raises UsageError for a
    cell that does not fail.
    """
    case = Cell.parse(text)
    get_law(case.law)
    if options.output is not None:
        require_writable(options.output)
    with show_progress("shrinks"):
        found = smallest(case, options.seed, get_environment(case.engine), options.timeout, seconds)
    click.echo(describe_shrink_result(found), err=True)
    last = found.record.cell
    if found.record.verdict not in EXPORTABLE_VERDICTS:
        click.echo(
            f"no script is written, for its end would be waited for in vain: {found.record.verdict.value}",
            err=True,
        )
        return 0
    if found.program is not None and (has_short_script(found.program) or is_judged_by_law(last, found.claims)):
        version = found.record.engine_version
        script = render_program_script(case.engine, version, found.program, found.outcome, found.claims)
        record = replace(found.record, verdict=found.outcome.verdict, cause=found.outcome.cause)
        return write_and_verify(script, record, options.output, get_run_script and get_run_script(case.engine))
    script = render_cell_script(found.record, found.claims, "script.py")
    return write_and_verify(script, found.record, options.output, get_run_script and get_run_script(case.engine))


def describe_shrink_result(result: ShrinkResult) -> str:
    """The smallest cell, the smallest program, and the commands that show them again."""
    lines = [f"{result.attempts} cells and programs tried; the smallest cell that fails in the same way:"]
    lines += [
        f"  {result.record.cell.id} ({result.cell_module_count} modules with parameters)",
        f"    {result.record.cause}",
        f"    again: {result.record.command}",
    ]
    if result.program is not None:
        where = f"{result.module_count} modules, stage {result.program.stage}, {result.program.world_size} ranks"
        lines += [
            f"the smallest program: {where}",
            f"  {result.outcome.describe(result.record.cell.engine, [result.program])}",
        ]
    return "\n".join(lines)
