"""Check a user's engine from a test file, with the text of the documentation, and without pytest."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import zharness
from suites.warm import programs
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.run import Verdict

ROOT = Path(__file__).parents[2]
FILES = ("my_engine.py", "test_my_engine.py")


def test_the_documentation_s_engine_keeps_the_laws_that_it_claims(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name in FILES:
        (text,) = [block for block in blocks if block.startswith(f"# {name}\n")]
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = ("-v", "-p", "no:cacheprovider", "--isolation", "pooled", "-k", "exact and (grads or accumulation)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run("-m", "pytest", *options, FILES[1], folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training.accumulation[my_engine:MyEngine-zero0-w2-fp32-exact-caller]] PASSED" in done.stdout


def test_laws_run_without_pytest_and_under_an_engine_variant() -> None:
    records = zharness.run_laws(
        "reference", checks=("training.grads",), stages=(2,), models=("exact",), variant="tiny_buckets"
    )
    (record,) = records
    assert record.cell == Cell("training.grads", "reference", 2, 2, "fp32", "exact", "", "tiny_buckets")
    assert record.verdict is Verdict.PASS, record.cause


def test_a_factory_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(UsageError, match=r"which ranks cannot import; expected a function or class at the top level"):
        zharness.check_engine(lambda model, config: None)
