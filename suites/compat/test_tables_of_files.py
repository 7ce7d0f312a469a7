"""The tables of DeepSpeed's test files are the same on every machine."""

from __future__ import annotations

import importlib

import pytest

from suites.meta.documents import ROOT


def test_a_reason_has_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    runs, tables = (importlib.import_module(f"deepspeed_files.{name}") for name in ("runs", "tables"))
    folder = f"/var/cache/{runs.FOLDER_PREFIX}t488c6ka"
    outcomes = {"test_resume": ("failed", f"file {folder}/tests/unit/test_zero.py, line 26: no fixture 'baseline'")}
    run = runs.FileRun("unit/test_zero.py", runs.Way.OWN, 0, 1.0, 1.0, 1, outcomes)
    assert tables.find_reason(run) == "file tests/unit/test_zero.py, line 26: no fixture 'baseline'"
