"""The wheel has every file that commands read, and reproduces a bug from a folder outside the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE = ("README.md", "FINDINGS.md", "CHANGELOG.md")
SOURCES = ("zharness", "repro", "docs", *BESIDE, "pyproject.toml", "LICENSE", "scripts/readme_metadata.py")
BUILD = "import sys, hatchling.build as backend; print(backend.build_wheel(sys.argv[1]))"
MAIN = "from zharness.cli import main; main()"
NOT_PACKAGED = {".pyc"}
BUG = "zero1-step-between-backwards"  # needs torch alone


def run_python(*arguments: str, folder: Path, path: str = "") -> str:
    """Run Python in ``folder``, with ``path`` before all other packages, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the sources, so that the build leaves nothing in the clone."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        (source / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    return folder / run_python("-c", BUILD, str(folder), folder=source).splitlines()[-1]


def list_files(folder: Path) -> set[str]:
    """Return the path of every file in a folder of the clone, from that folder's parent."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in NOT_PACKAGED)
    return {str(path.relative_to(folder.parent)) for path in files}


def test_a_wheel_is_whole_and_reproduces_a_bug(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        description = wheel.read(metadata).decode("utf-8")
        wheel.extractall(tmp_path / "installed")
    assert "Does a sharded training engine compute what plain PyTorch computes?" in description
    assert "](docs/" not in description  # an index has no such file
    scripts = {f"zharness/{name}" for name in list_files(ROOT / "repro")}
    modules = list_files(ROOT / "zharness") - {"zharness/releases/repro_package.py"}  # which the wheel has elsewhere
    pages = {f"zharness/{name}" for name in (*list_files(ROOT / "docs"), *BESIDE)}
    assert packaged == modules | scripts | pages | {"zharness/repro/__init__.py"}
    path = str(tmp_path / "installed")
    imported = run_python("-c", "import zharness; print(zharness.__file__)", folder=tmp_path, path=path)
    assert imported.startswith(path)
    assert " as expected " in run_python("-c", MAIN, "repro", BUG, folder=tmp_path, path=path)
    assert "# A site of many runs" in run_python("-c", MAIN, "docs", "site", folder=tmp_path, path=path)
    collected = run_python(
        "-m", "pytest", "--pyargs", "zharness.repro", "--collect-only", "-q", folder=tmp_path, path=path
    )
    assert len({line.partition("::")[0] for line in collected.splitlines() if "::" in line}) == len(scripts)
