"""The docstring of zharness/__init__.py is the map of the code: compare it with a traced run and with the floors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import zharness
from suites.meta.documents import ROOT
from suites.meta.test_house import FLOORS, PACKAGE
from zharness.cli.name_index import load_index

CELL = "training.grads[reference-zero3-w2-fp32-mlp]"
FILE = re.compile(r"[\w/]+\.py")


def map_section(title: str) -> str:
    """Return the section of the map with this title."""
    sections = re.split(r"^\[Note: (.+)\]$", zharness.__doc__ or "", flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[title]


def files_of_path() -> set[str]:
    """Return the files of the package that the map names on the path of a cell."""
    named = set(FILE.findall(map_section("a cell from command to verdict")))
    return {name for name in named if not name.startswith("suites/")}


def trace(folder: Path) -> set[str]:
    """Run one cell and return the files whose functions ran: in the command, its rank server, the ranks, the judge."""
    log = folder / "trace"
    search_path = os.pathsep.join([str(Path(__file__).parent / "trace_site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "zharness", "check", CELL],
        env={**os.environ, "ZHARNESS_TRACE": str(log), "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(log.read_text(encoding="utf-8").splitlines())


def test_the_map_names_the_files_that_a_cell_passes_and_no_others(tmp_path: Path) -> None:
    load_index()  # from now on the traced run finds the names of laws in a file
    passed, named = trace(tmp_path), files_of_path()
    assert not passed - named, (
        f"zharness/__init__.py, [Note: a cell from command to verdict] lacks {sorted(passed - named)}"
    )
    assert not named - passed, (
        f"the map in zharness/__init__.py names files that no call passes: {sorted(named - passed)}"
    )


def test_every_file_of_the_map_exists() -> None:
    missing = [name for name in FILE.findall(zharness.__doc__ or "") if not (PACKAGE / name).is_file()]
    assert not [name for name in missing if not (ROOT / name).is_file()], missing


def test_the_map_has_every_package_on_its_floor() -> None:
    lines = re.findall(r"^    (\d+) +(.+)$", map_section("floors"), re.MULTILINE)
    floors = {name.strip(): int(floor) for floor, names in lines for name in names.split(",")}
    assert floors == FLOORS
