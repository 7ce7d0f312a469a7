"""Render the docstring of an exported script in the format of the scripts in repro/."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from enum import Enum

from zharness.engines import registry
from zharness.laws import Law
from zharness.run.claims import NO_RELEASE
from zharness.run.record import Record, Verdict

WIDTH = 120
WRONG_NUMBER_PHRASE = "plain PyTorch gives"  # part of every mismatch that parts/compare.py.txt prints


class ScriptForm(Enum):
    """The requirement of an exported script: it needs this package, or only torch and the engine."""

    IMPORTED = "imported"
    STANDALONE = "standalone"


def render_cell_docstring(
    record: Record,
    law: Law,
    signature: str,
    success_line: str,
    name: str,
    explanation: str,
    form: ScriptForm = ScriptForm.STANDALONE,
) -> str:
    """Return the docstring of a cell's script; ``explanation`` says how the script decides whether the law holds."""
    cell = record.cell
    options = f", options {cell.engine_variant}" if cell.engine_variant else ""
    mesh = f" on the mesh {cell.mesh.label}" if cell.mesh.sizes else ""
    ranks = f"{cell.world_size} ranks{mesh}"
    where = f"{cell.engine_label} {record.engine_version} at stage {cell.stage}, {ranks}{options}"
    holds = "holds" if record.verdict is Verdict.PASS else "does not hold"
    return render_docstring(
        title=f"{cell.law} {holds} on {where}.",
        engine=cell.engine,
        version=record.engine_version,
        ranks=cell.world_size,
        law=cell.law,
        cause=record.cause,
        signature=signature,
        success_line=success_line,
        name=name,
        notes=[
            f"The law: {law.statement}. {explanation}",
            f"Written by: zharness export '{cell.id}'" + (f" --seed {record.seed}" if record.seed else ""),
        ],
        report_url=record.expected_failure,
        form=form,
    )


def render_docstring(
    title: str,
    engine: str,
    version: str,
    ranks: int,
    law: str,
    cause: str,
    signature: str,
    success_line: str,
    name: str,
    notes: Sequence[str],
    report_url: str = "",
    form: ScriptForm = ScriptForm.STANDALONE,
) -> str:
    """Return a docstring with the title, ``key: value`` lines, the command that runs the script, and ``notes``."""
    name_of_engine = registry.split_release(engine)[0]
    stem = re.sub(r"\W+", "-", f"{law}-{name_of_engine}").strip("-")
    facts = {
        "id": f"{stem}-w{ranks}",
        "engine": name_of_engine,
        "symptom": textwrap.shorten(" ".join(cause.split()) or "none", WIDTH - len("symptom: "), placeholder=" ..."),
        "reported": report_url or "no report known",
        "affects": ">=0" if version == NO_RELEASE else f"=={version.partition('+')[0]}",
        "fixed": "not yet",
        "ranks": str(ranks),
        "law": law,
        "signature": signature,
        "ok": success_line,
    }
    package = (
        "zharness"
        if name_of_engine == "reference"
        else name_of_engine
        if name_of_engine == "deepspeed" or ":" in name_of_engine
        else ""
    )
    imported = ["zharness"] if form is ScriptForm.IMPORTED and not package.startswith("zharness.") else []
    needs = " and ".join(dict.fromkeys(filter(None, ["torch", package, *imported])))
    ending = (
        'If the law holds, the script ends with the line above after "ok:" and exit code 0. If the law is broken, it '
        'ends with a line that starts with "repro: REPRODUCED" and exit code 1. Any other output decides nothing.'
    )
    paragraphs = [
        title,
        "\n".join(f"{key}: {value}" for key, value in facts.items()),
        f"Run it with nothing but {needs} installed:",
        f"    torchrun --standalone --nproc_per_node={ranks} {name}",
        *map(wrap_paragraph, (*notes, ending)),
    ]
    text = "\n\n".join(paragraphs).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""\n\nfrom __future__ import annotations'


def wrap_paragraph(text: str) -> str:
    """Break a paragraph into lines of at most ``WIDTH`` columns."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
