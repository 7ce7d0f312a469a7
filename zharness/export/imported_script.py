"""Render the script of a cell or program that imports this package's observers and judge: at most 80 lines."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import fields

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.export.cell_script import extract_signature
from zharness.export.header import ScriptForm, render_cell_docstring
from zharness.export.program_script import (
    extract_exception,
    has_short_script,
    render_observe,
    render_program_header,
    render_program_model,
)
from zharness.export.script_writer import Script, ScriptWriter, quote
from zharness.laws import Law, get_law
from zharness.run.program_runner import ProgramOutcome
from zharness.run.record import Record
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program

MAX_LINES = 80
EXPLANATION = "The script imports the law's observer and judge, and the engine's adapter, from zharness."


def render_imported_cell_script(record: Record, claims: Capabilities, name: str) -> Script:
    """Return the script that runs the cell of ``record`` under torchrun; ``name`` is its file name in its docstring."""
    cell = record.cell
    law = get_law(cell.law)
    ok = f"repro: {cell.law} on {cell.engine_label} at stage {cell.stage} OK."
    signature = extract_signature(record, is_judged=True)
    head = render_cell_docstring(record, law, signature, ok, name, EXPLANATION, ScriptForm.IMPORTED)
    arguments = [quote(cell.id), f"seed={record.seed}", f"signature={quote(signature)}", f"ok={quote(ok)}"]
    call = "status = run_cell(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    text = f"{head}\n\nimport sys\n\nfrom zharness.export.script_run import run_cell\n\n"
    return Script(add_steps(text, f"{call}\nsys.exit(status)\n", describe_observer(cell, law)), signature, ok)


def describe_observer(cell: Cell, law: Law) -> str:
    """Return the source of the function that every rank runs, under a line that says where it is."""
    function = law.steps.function if law.steps is not None else law.observe
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    where = f"Every rank runs {module}.{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # a partial, or a function that was created at run time, has no source
        return where
    return f"{where}{f', variant {cell.variant}' if cell.variant else ''}:\n\n{source}"


def render_imported_program_script(
    engine: str, version: str, program: Program, outcome: ProgramOutcome, claims: Capabilities
) -> Script:
    """Return the script that runs ``program`` under torchrun, with its steps written out as comments."""
    raised = "raised: " in outcome.cause
    signature = extract_exception(outcome.cause) if raised else outcome.cause.partition(":")[0]
    head, ok = render_program_header(engine, version, program, outcome, signature, ScriptForm.IMPORTED)
    parsed = parse_program(str(program))
    settings = {each.name: getattr(program, each.name) for each in fields(Program)}
    settings["mesh"] = program.mesh.label or parsed.mesh
    changed = {name: value for name, value in settings.items() if value != getattr(parsed, name)}
    arguments = [
        *(f"{name}={quote(value) if isinstance(value, str) else repr(value)}," for name, value in changed.items()),
        *(f"signature={quote(signature)},", f"ok={quote(ok)},"),
    ]
    call = "\n    ".join([f"status = run_program(\n    {quote(engine)},", f"{quote(str(program))},", *arguments])
    text = f"{head}\n\nimport sys\n\nfrom zharness.export.script_run import run_program\n\n"
    return Script(add_steps(text, f"{call}\n)\nsys.exit(status)\n", describe_program(program, engine)), signature, ok)


def describe_program(program: Program, engine: str) -> str:
    """Return the program as calls of PyTorch and the engine, or its text if a verb needs more than two lines."""
    if not has_short_script(program):
        return f"The program is {program}"
    writing = ScriptWriter(engine)
    return f"The program does this:\n\n{render_program_model(writing, program)}\n\n\n{render_observe(writing, program)}"


def add_steps(before: str, after: str, steps: str) -> str:
    """Return the script with ``steps`` as comments between the two texts, cut so that it has at most MAX_LINES."""
    room = MAX_LINES - len((before + after).splitlines()) - 1
    lines = steps.strip().splitlines()
    if len(lines) > room:
        lines = [*lines[: max(room - 1, 1)], "... and so on"]
    comment = "\n".join(f"# {line}".rstrip() for line in lines)
    return f"{before}{comment}\n{after}"
