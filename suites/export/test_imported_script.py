"""`zharness export` writes a script of at most 80 lines, whose judge is imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suites.export.test_export import cells_to_export, get_claims, make_record
from suites.warm import programs
from zharness.cell import Cell
from zharness.engines import EngineInfo
from zharness.export.header import render_docstring
from zharness.export.imported_script import MAX_LINES, add_steps, render_imported_cell_script
from zharness.export.script_run import describe_other_release
from zharness.releases.repros import parse_repro
from zharness.run.claims import NO_RELEASE

BROKEN = "training.grads[zharness.mutants:never_reduces-zero0-w2-fp32-mlp]"


def test_the_script_of_every_law_has_at_most_80_lines_and_imports_its_judge(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    for cell in [*cells_to_export(whole=False), *cells_to_export(whole=True)]:
        script = render_imported_cell_script(make_record(cell), get_claims(cell.engine, cell.stage), "x.py")
        assert len(script.text.splitlines()) <= MAX_LINES, cell.id
        assert "from zharness.export.script_run import run_cell" in script.text
        compile(script.text, cell.id, "exec")
        path.write_text(script.text)
        assert parse_repro(path).signature == script.signature


def test_the_steps_of_a_long_script_are_cut_to_80_lines() -> None:
    text = add_steps("before\n", "after\n", "step\n" * 200)
    assert len(text.splitlines()) in (MAX_LINES - 1, MAX_LINES)
    assert text.startswith("before\n# step\n")
    assert text.endswith("# step\n# ... and so on\nafter\n")


@pytest.mark.parametrize(
    ("cell_id", "verdict"),
    [
        (BROKEN, "reproduced"),
        pytest.param("state.resume[ddp-zero0-w2-fp32-mlp-sgd]", "not reproduced", marks=pytest.mark.exhaustive),
    ],
)
def test_the_script_shows_the_verdict_of_its_cell(cell_id: str, verdict: str, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    run = programs.run("-m", "zharness", "export", "-o", str(script), cell_id, spares=1)
    assert run.returncode == 0, run.stderr
    assert f"the script: {verdict} (" in run.stderr
    assert "under torchrun, the script shows the same verdict" in run.stderr
    assert re.search(rf"\b{Cell.parse(cell_id).law}\b", script.read_text())


def test_a_script_says_that_another_release_is_installed_than_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineInfo, "version", lambda info: "0.19.8+cpu")
    assert describe_other_release("deepspeed==0.18.1") == (
        "The failure was seen on deepspeed 0.18.1, but deepspeed 0.19.8+cpu is installed here, "
        "which may end differently."
    )
    assert not describe_other_release("deepspeed==0.19.8")
    assert not describe_other_release("deepspeed")


def test_an_engine_without_a_release_gets_a_header_that_can_be_read(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    engine, law = "suites.model.local_norms:reference", "training.grads"
    script.write_text(
        render_docstring("It fails.", engine, NO_RELEASE, 2, law, "why", "why", "ok: it holds", script.name, [])
    )
    assert parse_repro(script).affects == ">=0"
