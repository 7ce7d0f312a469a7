"""Define a family of test files: those of DeepSpeed, or those of PyTorch (``scripts/side_by_side.py``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from both_ways.runs import COLLECTION, FileRun, Selection, Way


@dataclass(frozen=True)
class Source:
    """The files of a family: their folder, the folder of the ``records``, the seconds of one file, and CPU devices.

    With ``cpu_devices`` above 0, the tests run on a CPU that counts as so many devices.
    """

    root: Path
    records: Path
    limit: float
    cpu_devices: int


@dataclass(frozen=True)
class Family:
    """Test files of one project, and how one of them runs.

    ``classes`` is what the tables call the project's own classes. ``starts_ranks`` tells of a file whether the drop-ins
    replace a class of it; any other file runs the same both ways.
    """

    name: str
    owner: str
    classes: str
    find_files: Callable[[Path, str], list[str]]
    starts_ranks: Callable[[Path], bool]
    run_file: Callable[[Source, str, Way, Selection], FileRun]

    def read_exceptions(self) -> Exceptions:
        """Return the exceptions of the family, which stand beside this module."""
        return Exceptions.from_toml((Path(__file__).parent / f"{self.name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Exceptions:
    """What the files of a family may do, with the reasons.

    ``stand_in`` has the exceptions of the reference engine by path, with one for each file that is not collected.
    ``differences`` are patterns for the messages of tests that may end otherwise with the drop-in, ``slower`` the files
    of which it saves less than half of the CPU seconds, and ``failing`` the reasons for failures where it ran alone.
    """

    stand_in: Mapping[str, list[dict[str, Any]]]
    differences: list[str]
    slower: set[str]
    failing: list[dict[str, Any]]

    @staticmethod
    def from_toml(text: str) -> Exceptions:
        """Read the exceptions of one family."""
        entries = tomllib.loads(text)
        stand_in = {entry["path"]: entry.get("exception", []) for entry in entries.get("file", [])}
        for group in entries.get("uncollectable", []):
            entry = {"tests": re.escape(COLLECTION), "kind": group["kind"], "reason": group["reason"]}
            stand_in |= {path: [entry, *stand_in.get(path, [])] for path in group["paths"]}
        return Exceptions(
            stand_in,
            [entry["message"] for entry in entries.get("difference", [])],
            {path for entry in entries.get("below_two", []) for path in entry["paths"]},
            entries.get("failing", []),
        )


def list_by_size(root: Path, files: Iterable[Path], text: str) -> list[str]:
    """Return the files whose path, relative to ``root``, contains ``text``; small files first."""
    by_size = sorted(files, key=lambda file: (file.stat().st_size, file))
    return [path for path in (str(file.relative_to(root)) for file in by_size) if text in path]
