"""Record which functions of an engine's source each cell reaches, and read such a record.

The record is a file of JSON lines. The first line has the version of the format, which REACH_VERSION counts, and the
names of all functions and of their branches, as in
``deepspeed/runtime/engine.py:DeepSpeedEngine.step > if self.training``. Each other line has a cell with its seconds,
its verdict, and the numbers of the functions and branches that it reached. coverage.py measures on the ranks, which
makes a run about 1.5 times as long.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.registry import info, split_release
from zharness.errors import UsageError
from zharness.run.engine_sources import (
    find_source_roots,
    list_functions,
    list_source_modules,
    name_lines,
)
from zharness.run.files import write_atomically
from zharness.run.interrupts import ignore_interrupts
from zharness.run.observe_and_judge import observe
from zharness.run.record import Record, Verdict

if TYPE_CHECKING:
    from coverage import Coverage

REACH_VERSION = 2  # of the format; format 1 had no branches and no version. The cache keys of workflows also have it.

SAVE_INTERVAL = 300.0  # seconds after which the record of an unfinished run is written again


@dataclass(frozen=True)
class CellReach:
    """The functions that the ranks of one cell reached, its verdict, and the seconds that it took.

    The seconds are processor seconds of one rank, or wall-clock seconds if a rank did not return.
    """

    functions: frozenset[str]
    seconds: float
    verdict: Verdict = Verdict.PASS

    @property
    def failed(self) -> bool:
        """Return whether the cell failed when it was recorded, expectedly or not."""
        return self.verdict not in (Verdict.PASS, Verdict.CONTRACT)


def observe_with_reach(
    folder: str, cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, options: Mapping[str, Any]
) -> None:
    """On every rank: observe the cell, and write the lines that it reached into a new file in ``folder``.

    If a rank is killed, the lines that it reached are lost. Ranks do not look up the functions of the lines: many ranks
    run a single cell, and would have to parse the source for that cell.
    """
    measurement = get_measurement(list_source_modules(info(cell.engine)))
    measurement.start()
    measurement.switch_context(cell.id)
    try:
        observe(cell, salt, evidence_dir, capabilities, options)
    finally:
        measurement.stop()
        data = measurement.get_data()
        data.set_query_context(cell.id)
        lines = {path: data.lines(path) or [] for path in data.measured_files()}
        content = json.dumps({"cell": cell.id, "lines": {path: reached for path, reached in lines.items() if reached}})
        # Write under a temporary name and rename, because the recorder reads the folder while other cells run.
        write_atomically(content, Path(folder, f"{os.getpid()}.{uuid4().hex}.json"))


@cache
def get_measurement(modules: tuple[str, ...]) -> Coverage:
    """Return the one measurement of this process, which separates cells by contexts of coverage.py.

    A measurement decides for each file of the process whether to trace it, and stays in memory until the process ends.
    A measurement for each cell would cost a pooled rank a third of its time, and half a megabyte for each cell.
    """
    from coverage import Coverage

    # coverage.py makes one regular expression of all patterns, which would take a second for the 700 files of a
    # package. With an empty list, coverage.py would measure every file.
    patterns = [f"{root}/**/*.py" if root.is_dir() else str(root) for root in find_source_roots(modules)]
    measurement = Coverage(data_file=None, include=patterns or ["no source"], config_file=False)
    measurement.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    return measurement


@cache
def name_lines_of_file(path: str, modules: tuple[str, ...]) -> dict[int, str]:
    """Map each line of a source file that is in a function to the innermost function, named as in a record."""
    names = name_lines(list_functions(Path(path).read_text(encoding="utf-8")), with_signatures=False)
    prefix = shorten_path(Path(path), modules)
    return {line: f"{prefix}:{name}" for line, name in names.items()}


def shorten_path(path: Path, modules: tuple[str, ...]) -> str:
    """Return the path of a source file from the folder of its top-level package on, with slashes.

    The path of a module that is in no package is the name of its file. A package without ``__init__.py`` begins at the
    last folder that has its name.
    """
    packages = {module.partition(".")[0] for module in modules}
    named = [number for number, part in enumerate(path.parts) if part in packages]
    start = next((number for number in named if is_top_level(path, number)), None)
    if start is None:
        start = len(path.parts) - 1 if path.stem in packages or not named else named[-1]
    return "/".join(path.parts[start:])


def is_top_level(path: Path, number: int) -> bool:
    """Return whether the folder ``path.parts[number]`` is a package and its parent folder is not a package."""
    folder = Path(*path.parts[: number + 1])
    return (folder / "__init__.py").is_file() and not (folder.parent / "__init__.py").is_file()


class ReachRecorder:
    """Collects the reach of cells while they run, and writes it into the record ``path`` every SAVE_INTERVAL seconds.

    Ranks write the lines that they reach into ``folder``. ``earlier`` is the reach of cells of earlier runs, which the
    record keeps. ``clock()`` returns the time in seconds.
    """

    def __init__(
        self, folder: Path, path: Path, earlier: Mapping[str, CellReach], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._path = path
        self._clock = clock
        self._saved = clock()
        # Store tuples, because sets would take a quarter of a gigabyte for a whole covering array.
        self._functions = {cell: tuple(reach.functions) for cell, reach in earlier.items()}
        self._outcomes = {cell: (reach.seconds, reach.verdict) for cell, reach in earlier.items()}
        self._running = dict[str, set[str]]()

    def add(self, record: Record) -> None:
        """Add the functions that the cell of ``record`` has reached, unless no rank wrote a file for the cell."""
        for file in self._folder.glob("*.json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            cell = Cell.parse(content["cell"])
            names = name_reached_lines(content["lines"], list_source_modules(info(cell.engine)))
            self._running.setdefault(name_in_record(cell), set()).update(names)
            file.unlink()
        name = name_in_record(record.cell)
        if name in self._running:
            self._functions[name] = tuple(self._running.pop(name))
            cpu_seconds = record.rank_cpu_seconds  # on a busy machine, the wall-clock time is ten times as long
            seconds = record.seconds if cpu_seconds is None else cpu_seconds / record.cell.world_size
            self._outcomes[name] = (seconds, record.verdict)
        if self._clock() - self._saved >= SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Write the record. Raises UsageError if that fails."""
        names = sorted(set().union(*self._functions.values()))
        numbers = {name: number for number, name in enumerate(names)}
        lines = [
            {
                "cell": cell,
                "seconds": round(self._outcomes[cell][0], 3),
                "verdict": self._outcomes[cell][1].value,
                "functions": sorted(numbers[name] for name in functions),
            }
            for cell, functions in self._functions.items()
        ]
        head = {"version": REACH_VERSION, "functions": names}
        write_atomically("".join(json.dumps(line) + "\n" for line in (head, *lines)), self._path)
        self._saved = self._clock()


def name_reached_lines(lines: Mapping[str, Sequence[int]], modules: tuple[str, ...]) -> set[str]:
    """Return the functions and branches that contain ``lines``, which maps each source file to line numbers."""
    return {
        name
        for source, reached in lines.items()
        for name in map(name_lines_of_file(source, modules).get, reached)
        if name is not None
    }


@contextmanager
def open_reach_recorder(folder: Path, path: Path, earlier: Mapping[str, CellReach]) -> Iterator[ReachRecorder]:
    """Open a ReachRecorder, which writes the record when the ``with`` block ends, also if the block raises."""
    recorder = ReachRecorder(folder, path, earlier)
    try:
        yield recorder
    finally:
        with ignore_interrupts():  # the record of a run of hours would be lost
            recorder.save()


def read_earlier_reach(path: Path, earlier_cells: Set[Cell]) -> dict[str, CellReach]:
    """Read the reach of ``earlier_cells``, by ``name_in_record``; without earlier cells, a run starts a new record.

    Raises UsageError as ``read_reach`` does.
    """
    if not earlier_cells or not path.exists():
        return {}
    names = set(map(name_in_record, earlier_cells))
    return {name: reach for name, reach in read_reach(path).items() if name in names}


def name_in_record(cell: Cell) -> str:
    """Return the id of ``cell`` without the release or the checkout of its engine.

    A record of a checkout also serves another checkout of the same engine, elsewhere or on another machine.
    """
    return replace(cell, engine=split_release(cell.engine)[0]).id


def read_reach(path: Path) -> dict[str, CellReach]:
    """Read the record ``path``: the reach of each cell, by ``name_in_record``.

    Raises UsageError if the file is not a record, or is a record of another version, whose names would not match those
    of a change.
    """
    try:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        names = head["functions"]
        require_version(head.get("version", 1), path)
        return {
            name_in_record(Cell.parse(line["cell"])): CellReach(
                frozenset(names[number] for number in line["functions"]),
                line["seconds"],
                Verdict(line.get("verdict", Verdict.PASS)),
            )
            for line in lines
        }
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"cannot read {path} ({type(error).__name__}: {error}); expected a file that "
            "`zharness check --record-reach FILE` wrote"
        ) from error


def require_version(version: int, path: Path) -> None:
    """Raise UsageError unless ``version``, the version of the record ``path``, is REACH_VERSION."""
    if version != REACH_VERSION:
        raise UsageError(
            f"{path} is a record of reach of version {version}, expected version {REACH_VERSION}; record again with "
            f"`zharness check --engine NAME --record-reach {path}`"
        )
