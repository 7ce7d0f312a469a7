"""Measure on the ranks which branches of an engine's source the draws reach, with coverage.py, and merge the data.

Each rank writes the arcs of one run, which are pairs of line numbers. The process of the hunt adds them to the data
file of its session, which is one call of `zharness hunt`; the files of all sessions are combined at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from zharness.engines import Capabilities
from zharness.engines.registry import info
from zharness.run.engine_sources import find_source_files, list_source_modules, require_coverage
from zharness.run.program_runner import observe_programs
from zharness.workload.programs import Program

RUN_FILE, SESSION_FILE, COMBINED_FILE = "run", "session", "combined"


def make_measured_observer(engine: str, folder: Path) -> Callable[..., None]:
    """Return ``observe_programs`` with a measurement of the sources of ``engine``; ranks write it into ``folder``.

    Raises UsageError if coverage.py is missing.
    """
    require_coverage("--coverage")
    folder.mkdir(parents=True, exist_ok=True)
    return partial(observe_with_coverage, str(folder.resolve()), list_source_modules(info(engine)))


def observe_with_coverage(
    folder: str,
    modules: tuple[str, ...],
    engine: str,
    programs: Sequence[Program],
    evidence_dir: str,
    capabilities: Capabilities,
) -> None:
    """On every rank: run the programs, and write the arcs that they reached in ``modules`` into a new file.

    The arcs of a rank that is killed are lost.
    """
    from coverage import Coverage

    files = find_source_files(modules)
    measurement = Coverage(
        data_file=str(Path(folder) / RUN_FILE),
        data_suffix=f"{os.getpid()}.{uuid4().hex}",
        branch=True,
        include=list(files),
        config_file=False,
    )
    measurement.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    measurement.start()
    try:
        observe_programs(engine, programs, evidence_dir, capabilities)
    finally:
        measurement.stop()
        data = measurement.get_data()
        if data.measured_files():
            data.touch_files(files)  # so that files in which nothing was reached are also reported
        measurement.save()


class EngineCoverage:
    """The arcs that the draws of one hunt have reached, in this session and in earlier sessions.

    ``folder`` has the files of the ranks, the files of the sessions, and the combined file.
    """

    def __init__(self, folder: Path) -> None:
        """Read the data of earlier sessions. Raises UsageError if coverage.py is missing."""
        require_coverage("--coverage")
        from coverage import CoverageData

        self._folder = folder
        self._arcs: dict[str, set[tuple[int, int]]] = {}
        earlier = self._list_sessions()
        for path in earlier:
            data = CoverageData(str(path))
            data.read()
            self._add(data)
        self._session = CoverageData(str(folder / f"{SESSION_FILE}.{len(earlier) + 1}"))

    def _list_sessions(self) -> list[Path]:
        """Return the data files of all sessions."""
        # A process that is killed while it writes may leave other files, such as session.1-journal.
        return sorted(path for path in self._folder.glob(f"{SESSION_FILE}.*") if path.suffix[1:].isdecimal())

    def _add(self, data: Any) -> int:
        """Count the arcs in ``data``, and return how many of them are new."""
        count = 0
        for file in data.measured_files():
            known = self._arcs.setdefault(file, set())
            new = set(data.arcs(file) or ()) - known
            known |= new
            count += len(new)
        return count

    def collect(self) -> int:
        """Move the data that the ranks have written into the file of this session; return the number of new arcs."""
        from coverage import CoverageData
        from coverage.exceptions import DataError

        count = 0
        for path in sorted(self._folder.glob(f"{RUN_FILE}.*")):
            data = CoverageData(str(path))
            try:
                data.read()
                new = self._add(data)
            except DataError:  # a rank was killed while it wrote
                new = 0
            if new:
                self._session.update(data)
            data.close()
            path.unlink(missing_ok=True)
            count += new
        return count

    def combine(self) -> Path | None:
        """Combine the data of all sessions, and return the path of the result; None if nothing was reached."""
        from coverage import Coverage

        self._session.close()
        sessions = self._list_sessions()
        if not sessions:
            return None
        path = self._folder / COMBINED_FILE
        path.unlink(missing_ok=True)
        combined = Coverage(data_file=str(path), branch=True, config_file=False)
        combined.combine([str(each) for each in sessions], strict=True, keep=True)
        combined.save()
        return path
