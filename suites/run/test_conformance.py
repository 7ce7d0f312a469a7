"""Check a user's engine from a test file, with the text of the documentation, and without pytest; older names."""

from __future__ import annotations

import os
import re
import runpy
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zharness
from suites.warm import programs
from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.run import Request, Verdict, plan
from zharness.run.pytest_cells import build_request

ROOT = Path(__file__).parents[2]
FILES = ("my_engine.py", "test_my_engine.py")
ONE_CELL_OF_SEVERAL_GROUPS = "exact and (grads or accumulation) or refuse_pickle or state.resume or mlp-given_up"
TWO_TESTS = """
import pytest
import zharness

test_function = zharness.check_engine("reference", {name}=("training.grads",), stages=(3,), models=("exact",))

@pytest.mark.cells("reference", {name}=("training.grads",), stages=(3,), models=("exact",))
def test_marker(record):
    pass
"""


def test_the_documentation_s_engine_keeps_the_laws_that_it_claims(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name in FILES:
        (text,) = [block for block in blocks if block.startswith(f"# {name}\n")]
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = ("-v", "-p", "no:cacheprovider", "--isolation", "pooled", "-k", ONE_CELL_OF_SEVERAL_GROUPS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run("-m", "pytest", *options, FILES[1], folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training.accumulation[my_engine:MyEngine-zero0-w2-fp32-exact-caller]] PASSED" in done.stdout
    assert "training.several_backwards[my_engine:MyEngine-zero0-w2-fp32-mlp-given_up]] PASSED" in done.stdout


def test_the_documentation_s_engine_claims_what_has_a_meaning_for_it() -> None:
    """Most cells of the page's engine run; that they hold is the page's second command, which takes minutes."""
    page = (ROOT / "docs" / "your-engine.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n# my_engine.py\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102 - the page's own code
    claims: Capabilities = names["MyEngine"].capabilities
    cells = plan(Request((), ("my_engine:MyEngine",), (0,)), lambda _engine, _stage: claims)
    # A law of bf16 alone has no cell in fp32, whatever the engine claims.
    cells = [cell for cell in cells if "applies only to the dtypes" not in cell.unsupported_reason]
    refused = [cell for cell in cells if cell.unsupported_reason]
    assert len(refused) < len(cells) / 7, [cell.unsupported_reason for cell in refused]
    assert "not written" not in claims.refuses.values()


def test_laws_run_without_pytest_and_under_an_engine_variant() -> None:
    records = zharness.run_laws(
        "reference", laws=("training.grads",), stages=(2,), models=("exact",), variant="tiny_buckets"
    )
    (record,) = records
    assert record.cell == Cell("training.grads", "reference", 2, 2, "fp32", "exact", "", "tiny_buckets")
    assert record.verdict is Verdict.PASS, record.cause


def test_laws_run_on_a_mesh_with_and_without_pytest(tmp_path: Path) -> None:
    options = {"laws": ("mesh.norm",), "models": ("exact",), "stages": (0,), "mesh": "tp2"}
    records = zharness.run_laws("torch_tp", **options)
    assert "mesh.norm[torch_tp-zero0-w2.tp2-fp32-exact]" in [record.cell.id for record in records]
    assert all(record.verdict is Verdict.PASS for record in records), [record.cause for record in records]
    text = f"import zharness\n\ntest_laws = zharness.check_engine('torch_tp', **{options})\n"
    (tmp_path / "test_mesh.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run("-m", "pytest", "-v", "-p", "no:cacheprovider", folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"test_laws[{record.cell.id}] PASSED" in done.stdout for record in records), done.stdout


def test_a_factory_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"ranks cannot import the factory .*; expected a function or class at the top level"
    ):
        zharness.check_engine(lambda model, config: None)


def test_laws_may_be_given_by_the_older_name_of_the_parameter(tmp_path: Path) -> None:
    patterns = ("training.grads",)
    assert build_request("ddp", checks=patterns) == build_request("ddp", laws=patterns)
    assert build_request("ddp", laws=patterns).patterns == patterns
    for name in ("laws", "checks"):
        (tmp_path / f"test_{name}.py").write_text(TWO_TESTS.format(name=name), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ("--collect-only", "-q", "-p", "no:cacheprovider")
    done = programs.run("-m", "pytest", *options, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[training.grads[reference-zero3-w2-fp32-exact]]") == 4, done.stdout


@pytest.mark.parametrize("take", [zharness.check_engine, zharness.run_laws, build_request])
def test_laws_by_both_names_are_refused(take: Callable[..., object]) -> None:
    with pytest.raises(
        UsageError, match=r"got laws=\('state',\) and checks=\('training',\); expected laws, or its older"
    ):
        take("reference", laws=("state",), checks=("training",))


def test_the_soak_of_cells_takes_laws_by_both_names() -> None:
    parser = ArgumentParser()
    runpy.run_path(str(ROOT / "scripts" / "soaking" / "cells.py"))["arguments"](parser)
    options = parser.parse_args(["--jsonl", "clean.jsonl", "--law", "state", "--check", "training"])
    assert options.checks == ["state", "training"]
