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

from zharness.case import Case
from zharness.checks import CHECKS, check_named
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.export.frame import Script
from zharness.export.laws import told_whole
from zharness.export.programs import script_of_program, told_in_lines
from zharness.export.script import script_of, whole_cell
from zharness.export.shrink import Smallest
from zharness.export.shrink import shrink as smallest
from zharness.export.verify import Run, faithful, words
from zharness.run.files import check_writable, write_whole
from zharness.run.plan import named
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.world.server import Surroundings

Place = Callable[[str], Surroundings]
SHOWN = (Verdict.PASS, Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT)


@dataclass(frozen=True)
class Options:
    """The salt of the seed, seconds for the ranks of the cell, and where the script goes; None: standard output."""

    seed: int = 0
    timeout: float = 60.0
    output: Path | None = None


def export(text: str, options: Options, place: Place, run: Run | None) -> int:
    """Write the script of the cell that ``text`` names; 1 where it was run and does not show the cell's verdict.

    ``run`` runs a script to its end; None leaves that out. Raises UsageError for a cell of which there is no script.
    """
    case = Case.parse(text)
    check_named(case.check)
    if options.output is not None:
        check_writable(options.output)
    with progress("runs the cell"):
        record, claims = tried(case, options, place)
    if record.verdict not in SHOWN:
        raise UsageError(f"cannot export {case.id}: its verdict is {record.verdict.value}: {record.cause}")
    name = options.output.name if options.output is not None else "script.py"
    return written(script_of(record, claims, name), record, options.output, run)


def written(script: Script, record: Record, output: Path | None, run: Run | None) -> int:
    """Write the script of ``record``, and run it; 1 where it does not show the record's verdict."""
    place_text(script.text, output)
    if run is None:
        click.echo("not run, so that it shows the cell is not known", err=True)
        return 0
    with tempfile.TemporaryDirectory() as folder, progress("runs the script"):
        path = Path(folder) / "script.py"
        path.write_text(script.text, encoding="utf-8")
        shown = run(path)
    click.echo(words(record, shown), err=True)
    return int(not faithful(record, shown))


def tried(case: Case, options: Options, place: Place) -> tuple[Record, Capabilities]:
    """The cell's record, and what its engine claims. Raises UsageError for one that is not run."""
    with Runner({case.engine: place(case.engine)}, options.timeout, options.seed) as runner:
        planned = named(case, runner.claims)
        if planned.unsupported:
            raise UsageError(f"{case.id} is not run: {planned.unsupported}")
        return runner.run(planned), runner.claims(case.engine, case.stage)


def place_text(text: str, output: Path | None) -> None:
    """The script where it was asked for."""
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(text, output)


def progress(what: str) -> AbstractContextManager[object]:
    """A line on standard error while something takes seconds; silent where nobody watches."""
    return tqdm(total=1, desc=what, bar_format="{desc}: {elapsed}", leave=False, disable=not sys.stderr.isatty())


def listed() -> str:
    """Every law, and what its script is: the shorter the better to send."""
    rows = [(name, whole(told_whole(check, "fp32"))) for name, check in CHECKS.items()]
    return tabulate(rows, headers=("law", "script"), tablefmt="simple", disable_numparse=True)


def whole(reason: str) -> str:
    """In words what a script is, by the reason why it is a long one."""
    return f"long, with the law's own judge: {reason}" if reason else "short"


def shrink(text: str, options: Options, seconds: float, place: Place, run: Callable[[str], Run] | None) -> int:
    """Print the smallest that fails as the cell that ``text`` names does, and write its script.

    That of the program, unless the cell alone has a short one. ``run(engine)`` runs scripts. Raises UsageError for a
    cell that does not fail.
    """
    case = Case.parse(text)
    check_named(case.check)
    if options.output is not None:
        check_writable(options.output)
    with progress("shrinks"):
        found = smallest(case, options.seed, place(case.engine), options.timeout, seconds)
    click.echo(told(found), err=True)
    last = found.record.case
    if found.record.verdict not in SHOWN:
        click.echo(
            f"no script is written, for its end would be waited for in vain: {found.record.verdict.value}",
            err=True,
        )
        return 0
    if found.program is not None and (told_in_lines(found.program) or whole_cell(last, found.claims)):
        version = found.record.engine_version
        script = script_of_program(case.engine, version, found.program, found.outcome, found.claims)
        record = replace(found.record, verdict=found.outcome.verdict, cause=found.outcome.cause)
        return written(script, record, options.output, run and run(case.engine))
    script = script_of(found.record, found.claims, "script.py")
    return written(script, found.record, options.output, run and run(case.engine))


def told(found: Smallest) -> str:
    """The smallest cell, the smallest program, and the commands that show them again."""
    lines = [f"{found.tried} cells and programs tried; the smallest cell that fails in the same way:"]
    lines += [
        f"  {found.record.case.id} ({found.modules_of_cell} modules with parameters)",
        f"    {found.record.cause}",
        f"    again: {found.record.command}",
    ]
    if found.program is not None:
        where = f"{found.modules} modules, stage {found.program.stage}, {found.program.world_size} ranks"
        lines += [
            f"the smallest program: {where}",
            f"  {found.outcome.words(found.record.case.engine, [found.program])}",
        ]
    return "\n".join(lines)
