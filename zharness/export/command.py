"""The commands `zharness export` and `zharness shrink`, which run a cell, write its script and run the script."""

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

from zharness.cell import TF32, Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.export.cell_script import explain_unwritable_mesh, is_judged_by_law, render_cell_script
from zharness.export.header import ScriptForm
from zharness.export.imported_script import render_imported_cell_script, render_imported_program_script
from zharness.export.program_script import has_short_script, render_program_script
from zharness.export.published import PublishedForm, render_issue, render_plain_script, render_test
from zharness.export.script_length import explain_long_script
from zharness.export.script_writer import Script
from zharness.export.shrink import ShrinkResult, shrink_failure
from zharness.export.verify import RunScript, describe_verification, is_faithful
from zharness.laws import LAWS, get_law
from zharness.run.files import require_writable, write_atomically
from zharness.run.plan import plan_named_cell
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.world.server import RankEnvironment

GetEnvironment = Callable[[str], RankEnvironment]
RunPublished = Callable[[Path], tuple[int | None, str]]  # runs a script or a test; returns exit code and output
EXPORTABLE_VERDICTS = (Verdict.PASS, Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT)


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export: the salt of the cell's seed, the time-out, the path of the script, and its form.

    ``seed`` is the salt, which is mixed into the hash from which the cell's seed is derived. ``timeout`` is in seconds.
    If ``output`` is None, the script is written to standard output. ``form`` determines what the script may import.
    """

    seed: int = 0
    timeout: float = 60.0
    output: Path | None = None
    form: ScriptForm = ScriptForm.IMPORTED


def parse_exportable_cell(text: str, form: ScriptForm) -> Cell:
    """Return the cell whose id is ``text``. Raises UsageError for a mesh on which standalone scripts cannot run it."""
    cell = Cell.parse(text)
    get_law(cell.law)
    if cell.dtype == TF32:
        raise UsageError(f"got {cell.id}; expected another dtype than tf32, which a script does not set")
    reason = explain_unwritable_mesh(cell) if form is ScriptForm.STANDALONE else ""
    if reason:
        raise UsageError(
            f"got {cell.id}, {reason}; expected `zharness export` or `zharness shrink` without --standalone and --form"
        )
    return cell


def export(text: str, options: ExportOptions, get_environment: GetEnvironment, run_script: RunScript | None) -> int:
    """Write the script of the cell ``text``; return 1 if the script does not show the cell's verdict, else 0.

    ``run_script(path)`` runs a script and returns its verdict; if it is None, the script is not verified. Raises
    UsageError for a cell that cannot be written as a script.
    """
    record, claims = run_exported_cell(text, options, get_environment)
    cell = record.cell
    if record.verdict not in EXPORTABLE_VERDICTS:
        raise UsageError(f"cannot export {cell.id}: its verdict is {record.verdict.value}: {record.cause}")
    name = options.output.name if options.output is not None else "script.py"
    render = render_cell_script if options.form is ScriptForm.STANDALONE else render_imported_cell_script
    return write_and_verify(render(record, claims, name), record, options.output, run_script)


def export_published(
    text: str,
    options: ExportOptions,
    form: PublishedForm,
    get_environment: GetEnvironment,
    run: RunPublished,
    machine: str,
) -> int:
    """Run the cell ``text``, and print or write it as an issue or a test; return 1 if that does not show the failure.

    ``run(path)`` runs the script or the test and returns its exit code and output. ``machine`` is the description of
    the machine in the issue. Raises UsageError for a cell that does not fail, or that cannot be written as a script.
    """
    record, claims = run_exported_cell(text, replace(options, form=ScriptForm.STANDALONE), get_environment)
    cell = record.cell
    if record.verdict not in (Verdict.FAIL, Verdict.CRASH):
        raise UsageError(f"there is nothing to report of {cell.id}: its verdict is {record.verdict.value}")
    script = render_cell_script(record, claims, "script.py")
    is_test = form is PublishedForm.PYTEST
    published = render_test(script, cell) if is_test else render_plain_script(script)
    with (
        tempfile.TemporaryDirectory() as folder,
        show_progress("running the test" if is_test else "running the script"),
    ):
        path = Path(folder) / ("test_law.py" if is_test else "script.py")
        path.write_text(published, encoding="utf-8")
        code, output = run(path)
    shown = [line for line in output.splitlines() if script.signature in line]
    if code != 1 or not shown:
        click.echo(f"{form.value}: exit code {code} does NOT show {record.cause}\n{output[-2000:]}", err=True)
        return 1
    packages = f"torch {record.torch_version}, {cell.engine_label} {record.engine_version}"
    write_script_text(
        published if is_test else render_issue(record, published, shown[-1].strip(), packages, machine) + "\n",
        options.output,
    )
    click.echo(f"it fails as the cell does, with exit code 1: {shown[-1].strip()}", err=True)
    return 0


def write_and_verify(script: Script, record: Record, output: Path | None, run_script: RunScript | None) -> int:
    """Write the script of ``record`` and run it; return 1 if it does not show the verdict of ``record``, else 0.

    If ``run_script`` is None, the script is not run, and the result is 0.
    """
    write_script_text(script.text, output)
    if run_script is None:
        click.echo("the script was not run, so it may not show the cell's verdict", err=True)
        return 0
    with tempfile.TemporaryDirectory() as folder, show_progress("running the script"):
        path = Path(folder) / "script.py"
        path.write_text(script.text, encoding="utf-8")
        shown = run_script(path)
    click.echo(describe_verification(record, shown), err=True)
    return int(not is_faithful(record, shown))


def run_exported_cell(
    text: str, options: ExportOptions, get_environment: GetEnvironment
) -> tuple[Record, Capabilities]:
    """Run the cell ``text``; return its record and the claims of its engine.

    Raises UsageError if the cell is unsupported or cannot be exported, or if the output cannot be written.
    """
    cell = parse_exportable_cell(text, options.form)
    if options.output is not None:
        require_writable(options.output)
    with (
        show_progress("running the cell"),
        Runner({cell.engine: get_environment(cell.engine)}, options.timeout, options.seed) as runner,
    ):
        planned = plan_named_cell(cell, runner.claims)
        if planned.unsupported_reason:
            raise UsageError(f"cannot run {cell.id}: {planned.unsupported_reason}")
        return runner.run(planned), runner.claims(cell.engine, cell.stage)


def write_script_text(text: str, output: Path | None) -> None:
    """Write the script to the file ``output``, or to standard output if ``output`` is None."""
    if output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(text, output)


def show_progress(description: str) -> AbstractContextManager[object]:
    """Show the elapsed time on standard error while the block runs, if standard error is a terminal."""
    return tqdm(total=1, desc=description, bar_format="{desc}: {elapsed}", leave=False, disable=not sys.stderr.isatty())


def render_law_table() -> str:
    """Return a table that lists all laws and says whether the script of each law is short or long."""
    rows = [(name, describe_script_length(explain_long_script(law, "fp32"))) for name, law in LAWS.items()]
    return tabulate(rows, headers=("law", "script"), tablefmt="simple", disable_numparse=True)


def describe_script_length(reason: str) -> str:
    """Return ``short`` if ``reason`` is empty, else ``long`` with the reason."""
    return f"long, with the law's own judge: {reason}" if reason else "short"


def shrink(
    text: str,
    options: ExportOptions,
    seconds: float,
    get_environment: GetEnvironment,
    get_run_script: Callable[[str], RunScript] | None,
) -> int:
    """Find the smallest failure like that of the cell ``text``, print the failure, and write its script.

    The script runs the smallest program, or the smallest cell if no short script can run the program.
    ``get_run_script(engine)`` returns the function that runs scripts on that engine; if it is None, the script is not
    verified. Raises UsageError for a cell that does not fail.
    """
    cell = parse_exportable_cell(text, options.form)
    if options.output is not None:
        require_writable(options.output)
    with show_progress("shrinking"):
        result = shrink_failure(cell, options.seed, get_environment(cell.engine), options.timeout, seconds)
    click.echo(describe_shrink_result(result), err=True)
    last = result.record.cell
    if result.record.verdict not in EXPORTABLE_VERDICTS:
        click.echo(
            f"no script is written, because it would not end (the verdict is {result.record.verdict.value})",
            err=True,
        )
        return 0
    is_imported = options.form is ScriptForm.IMPORTED
    has_script = is_imported or (result.program is not None and has_short_script(result.program))
    if result.program is not None and (has_script or is_judged_by_law(last, result.claims)):
        version = result.record.engine_version
        render = render_imported_program_script if is_imported else render_program_script
        script = render(cell.engine, version, result.program, result.outcome, result.claims)
        record = replace(result.record, verdict=result.outcome.verdict, cause=result.outcome.cause)
        return write_and_verify(script, record, options.output, get_run_script and get_run_script(cell.engine))
    script = (render_imported_cell_script if is_imported else render_cell_script)(
        result.record, result.claims, "script.py"
    )
    return write_and_verify(script, result.record, options.output, get_run_script and get_run_script(cell.engine))


def describe_shrink_result(result: ShrinkResult) -> str:
    """Describe the smallest cell and the smallest program, with the commands that run them again."""
    lines = [f"tried {result.attempts} cells and programs; the smallest cell that fails in the same way is:"]
    lines += [
        f"  {result.record.cell.id} ({result.cell_module_count} modules with parameters)",
        f"    {result.record.cause}",
        f"    again: {result.record.command}",
    ]
    if result.program is not None:
        modules, ranks = result.module_count, result.program.world_size
        where = (
            f"{modules} module{'s' * (modules != 1)}, stage {result.program.stage}, {ranks} rank{'s' * (ranks != 1)}"
        )
        lines += [
            f"the smallest program: {where}",
            f"  {result.outcome.describe(result.record.cell.engine, [result.program])}",
        ]
    return "\n".join(lines)
