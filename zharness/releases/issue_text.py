"""Render a reproduction as a text for an upstream issue: the script, the expected and actual output, and versions."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from zharness.engines.registry import is_checkout, split_release
from zharness.errors import UsageError
from zharness.releases import overlay, repros
from zharness.releases.issue_script import strip_script
from zharness.releases.prepared_release import PreparedRelease, prepare_release
from zharness.releases.repro_runs import ReproRun, select_runs
from zharness.releases.repro_table import describe_run
from zharness.releases.repros import MARKER, NOT_YET, Repro, ReproResult, ReproVerdict, build_result, get_distribution

SCRIPT_NAME = "script.py"
MAX_OUTPUT_LINES = 30  # lines of each traceback
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
# The text before the path of a module inside a package, in the frames of a traceback.
_PACKAGE_FOLDER = re.compile(r'(?<=File ")[^"]*/(?:site-packages|dist-packages|lib/python3\.\d+)/')


@dataclass(frozen=True)
class IssueRun:
    """One run that shows a bug: the versions of its packages, its machine, and the part of its output with the bug.

    ``ending`` is the clause that follows the symptom in the text and introduces the output.
    """

    packages: str
    machine: str
    output: str
    ending: str = "exit code 1"


def print_issue(identifiers: tuple[str, ...], engines: tuple[str, ...], record: Path | None, seconds: float) -> int:
    """Print the text of one reproduction and return the exit code: 0, or 1 or 3 if the run does not show the bug.

    The stripped script is run on the last of ``engines``, by default on the release with the bug. With ``record``, no
    script is run; the run is read from this file of `zharness repro --jsonl`. Raises UsageError unless one reproduction
    is named.
    """
    runs = select_runs(identifiers, False, engines)
    found = sorted({run.repro.id for run in runs})
    if len(found) > 1:
        raise UsageError(f"--issue: got the reproductions {', '.join(found)}; name one")
    run = runs[-1]
    script = strip_script(run.repro.path.read_text(encoding="utf-8"))
    if record is not None:
        issue_run = read_issue_run(run, record)
    else:
        result, issue_run = run_stripped(run, script, seconds)
        if result.verdict is not ReproVerdict.REPRODUCED:
            click.echo(f"{result.verdict.value}, so there is no text\n{describe_run(result)}", err=True)
            return 1 if result.verdict is ReproVerdict.NOT_REPRODUCED else 3
    click.echo(render_issue(run.repro, script, issue_run))
    if run.repro.reported.startswith("https://"):
        click.echo(f"reported already: {run.repro.reported}", err=True)
    return 0


def run_stripped(run: ReproRun, script: str, seconds: float) -> tuple[ReproResult, IssueRun]:
    """Run the stripped ``script`` of a reproduction on its release; return its verdict, and the run to print.

    Raises UsageError if the release cannot be installed.
    """
    repro = run.repro
    environment = prepare_release(run.engine, get_distribution(repro.engine))
    if repro.needs and not overlay.has_cuda():
        evidence = "needs CUDA, and this machine has none"
        result = build_result(repro, run.engine, environment.release, ReproVerdict.UNSUPPORTED, evidence)
        return result, IssueRun("", "", "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SCRIPT_NAME
        path.write_text(script, encoding="utf-8")
        code, output = repros.run_script(path, repro.ranks, environment, seconds)
    shown = cut_output(output, repro.signature, (folder, *environment.search_path))
    verdict, evidence = judge_stripped(repro, code, output, shown, seconds)
    result = replace(build_result(repro, run.engine, environment.release, verdict, evidence), output=output)
    return result, IssueRun(describe_packages(run, environment), repros.describe_machine(), shown)


def judge_stripped(repro: Repro, code: int | None, output: str, shown: str, seconds: float) -> tuple[ReproVerdict, str]:
    """Return the verdict of a run of a stripped script, and the line that decides it."""
    if code == 1 and shown:
        return ReproVerdict.REPRODUCED, shown.splitlines()[-1]
    success = repro.ok.removeprefix("repro: ")
    if code == 0 and success in output.splitlines():
        return ReproVerdict.NOT_REPRODUCED, success
    return repros.judge_output(repro, code, output, seconds)


def cut_output(output: str, signature: str, folders: tuple[str, ...] = ()) -> str:
    """Return the lines with the signature, each with the traceback that ends there; '' if there is none.

    If several ranks print tracebacks with the same last line, the last traceback is returned. ``folders`` and the
    folders of installed packages are removed from the paths of files.
    """
    output = _PACKAGE_FOLDER.sub("", _RANK_PREFIX.sub("", output.replace(MARKER, "")))
    for folder in folders:
        output = output.replace(f"{folder}/", "")
    lines = output.splitlines()
    found: dict[str, list[str]] = {}
    begin = 0
    for number, line in enumerate(lines):
        if line == _TRACEBACK:
            begin = number
        elif signature in line and not line.startswith("  "):  # an indented line is the source of a frame
            is_traced = lines[begin] == _TRACEBACK and is_one_traceback(lines[begin + 1 : number])
            part = lines[begin:number] if is_traced else []
            if len(part) > MAX_OUTPUT_LINES:
                part = [*part[:3], "  ...", *part[4 - MAX_OUTPUT_LINES :]]
            found[line] = [*part, line]
    return "\n".join(line for part in found.values() for line in part)


def is_one_traceback(lines: list[str]) -> bool:
    """Return whether ``lines`` are frames and the beginning of a message of several lines."""
    ends = [number for number, line in enumerate(lines) if not line.startswith("  ")]
    return "" not in lines and not any(line.startswith("  File ") for line in lines[ends[0] if ends else len(lines) :])


def describe_packages(run: ReproRun, environment: PreparedRelease) -> str:
    """Return the versions of torch and of the engine, as in ``torch 2.13.0+cpu, deepspeed 0.19.8``."""
    package = get_distribution(run.repro.engine)
    if package == overlay.TORCH:
        is_installed = not environment.search_path
        return f"torch {overlay.torch_version() if is_installed else environment.release}"
    source = " (a source checkout)" if is_checkout(run.engine) else ""
    return f"torch {overlay.torch_version()}, {package} {environment.release}{source}"


def read_issue_run(run: ReproRun, record: Path) -> IssueRun:
    """Return the last run of a reproduction in ``record``, a file of `zharness repro --jsonl`, that shows the bug.

    Raises UsageError if the file has none.
    """
    release = split_release(run.engine)[1]
    try:
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{record} is not a file of `zharness repro --jsonl`: {error}") from error
    showing = [line for line in lines if shows_bug(line, run.repro) and release in (None, line["release"])]
    if not showing:
        raise UsageError(
            f"{record} has no run that shows {run.repro.id} with its output; make one: "
            f"zharness repro {run.repro.id} --on {run.engine} --jsonl FILE"
        )
    line = showing[-1]
    packages = f"torch {line['torch_version']}"
    package = get_distribution(run.repro.engine)
    packages = f"torch {line['release']}" if package == overlay.TORCH else f"{packages}, {package} {line['release']}"
    output = cut_output(line["output"], run.repro.signature)
    return IssueRun(packages, line["machine"], output, "an earlier run of a longer form of this script printed")


def shows_bug(line: Any, repro: Repro) -> bool:
    """Return whether ``line`` is the record of a run of ``repro`` that shows the bug, with its output."""
    is_shown = isinstance(line, dict) and line.get("verdict") == ReproVerdict.REPRODUCED.value
    return is_shown and line.get("repro") == repro.id and bool(line.get("output"))


def render_issue(repro: Repro, script: str, run: IssueRun) -> str:
    """Return the text for the issue in Markdown; its first line is the title."""
    title, explanation = read_explanation(repro)
    command = f"torchrun --standalone --nproc_per_node={repro.ranks} {SCRIPT_NAME}"
    success = repro.ok.removeprefix("repro: ")
    fixed = "" if repro.fixed is None else f" {get_distribution(repro.engine)} {repro.fixed} does so."
    affected = f"{get_distribution(repro.engine)} {repro.affects}, fixed: {repro.fixed or NOT_YET}"
    return f"""{title}

{explanation}

### To reproduce

`{command}` with this {SCRIPT_NAME}:

```python
{script}```

### Expected

It prints "{success}" and ends with exit code 0.{fixed}

### Actual

{repro.symptom}; {run.ending}:

```
{run.output}
```

### Versions

{run.packages}; {run.machine}. Releases with the bug, as far as they were run: {affected}."""


def read_explanation(repro: Repro) -> tuple[str, str]:
    """Return the title of a reproduction and the paragraphs of its docstring that explain the bug."""
    text = ast.get_docstring(ast.parse(repro.path.read_text(encoding="utf-8"))) or ""
    title, _, *rest = text.split("\n\n")
    boilerplate = ("Run it with", "    torchrun ", "If the bug is absent", "If the law holds", "Written by: ")
    kept = [" ".join(each.split()) for each in rest if not each.startswith(boilerplate)]
    return title.rstrip("."), "\n\n".join(kept)
