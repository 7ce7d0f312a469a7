"""The names of ``import zharness``: importable, lazy, and typed for users who run mypy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zharness
from zharness import world
from zharness.cell import Cell
from zharness.run import PlannedCell, Record, Verdict

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", zharness.__all__)
def test_every_public_name_is_importable(name: str) -> None:
    assert getattr(zharness, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zharness' has no attribute 'nonsense'"):
        _ = zharness.nonsense  # type: ignore[attr-defined]


def test_import_zharness_does_not_import_torch() -> None:
    code = "import sys, zharness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_mypy_sees_the_type_of_every_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only ``__getattr__`` knew would be ``Any``."""
    mypy = pytest.importorskip("mypy.api")
    names = [name for name in zharness.__all__ if name != "__version__"]
    program = tmp_path / "user.py"
    program.write_text("import zharness\n" + "".join(f"reveal_type(zharness.{name})\n" for name in names))
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    # Without site-packages torch is Any, and mypy does not spend twenty seconds on it.
    options = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", "--config-file", ""]
    options += ["--cache-dir", str(tmp_path / "cache")]
    report, errors, _ = mypy.run([*options, str(program)])
    revealed = [line for line in report.splitlines() if "Revealed type is" in line]
    assert not errors
    assert len(revealed) == len(names), report
    assert all('"def (' in line for line in revealed), report


def test_the_older_names_of_public_objects_work() -> None:
    cell = Cell.parse("training.grads[reference-zero3-w2-fp32-mlp]")
    record = Record(cell, 0, Verdict.FAIL, "1.0", "2.13.0", expected_failure="upstream", smallest_scale_error=0.5)
    assert (record.case, record.excuse, record.smallest, record.expected) == (cell, "upstream", 0.5, True)
    assert (record.stale, record.documented, record.withheld, record.modules) == ("", "", "", "")
    assert (record.verdict.broken, PlannedCell(cell).case) == (True, cell)
    assert (world.End, world.Work) == (world.RankEnd, world.RankTask)
    assert (world.Collectives, world.here) == (world.CollectiveMode, world.current_rank)
