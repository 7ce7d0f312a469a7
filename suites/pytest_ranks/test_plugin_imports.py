"""The plugin, installed beside somebody's tests that do not use it, imports next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PRINT_MODULES = """
import sys

def pytest_collection_finish(session):
    names = sorted({name for name in sys.modules if name.split(".")[0] in ("zharness", "torch", "numpy")})
    print("imported", *names)
"""


def test_an_unrelated_project_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PRINT_MODULES, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "zharness.plugin", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # other plugins may import numpy
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    imported = next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported"))
    assert set(imported) == {
        "zharness",
        "zharness.environment",
        "zharness.errors",
        "zharness.plugin",
        "zharness.pytest_ranks",
        "zharness.pytest_ranks.options",
    }
