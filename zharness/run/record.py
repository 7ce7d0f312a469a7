"""Define the record of a cell: its axes, its outcome, and its command. A record is one line of JSON."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, cast

from zharness.cell import Cell
from zharness.device.gpu_memory import GpuMemory
from zharness.errors import UsageError
from zharness.parity import Mismatch, Part
from zharness.parity.mismatch_report import MismatchReport
from zharness.run.files import partial_path, unwritable_error
from zharness.run.validation import require_field_types, require_type, require_valid_exhibit
from zharness.workload.user_model import IN_PROCESS_PACKAGE

SCHEMA = 2


class Verdict(Enum):
    """The verdict of a cell."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"  # a number is wrong
    CONTRACT = "contract"  # the engine documents that it differs, and its documented remedy passes
    CRASH = "crash"  # the engine raised an exception or ended its process
    HANG = "hang"
    ERROR = "error"  # the harness itself failed
    UNDETERMINED = "undetermined"  # no number is wrong, but most are smaller than their bound, so nothing is proved
    UNSUPPORTED = "unsupported"

    @property
    def is_broken(self) -> bool:
        """Return whether the law does not hold."""
        return self in (Verdict.FAIL, Verdict.CRASH, Verdict.HANG)

    @property
    def broken(self) -> bool:
        """Return ``is_broken``; this is the older name of that property."""
        return self.is_broken


@dataclass(frozen=True)
class Record:
    """The outcome of a cell.

    These fields are None if nothing was compared: ``tier``; ``ratio``, the largest error over its bound;
    ``smallest_scale_error``, the smallest relative scale error that the judge would have found; ``wrong_elements``, the
    number of lost elements of one tensor that the judge would have found; ``elements``, the number of compared
    elements; and ``undetermined``, the number of compared elements that are smaller than their bound. ``notes`` explain
    why a tier is not the tier that the law promises, or how the ranks' settings of torch differed.

    ``divergence`` is the first wrong number, and ``evidence`` is what the report shows about it. ``module_departures``
    describes the first modules that depart from the baseline if a rank's own computation is wrong. ``cause`` is one
    line. ``details`` contains the reports of all ranks and is not written to JSON.

    ``expected_failure`` is the upstream issue of an expected failure. If the law holds although a failure was expected,
    ``stale_reason`` names the entry to delete. ``documentation_url`` is where the engine documents the difference
    behind the verdict ``contract``. ``withheld_feature`` is a feature that the engine does not claim although the law
    holds with it. ``raising_frame`` names file, line and function of the user's or the engine's code that raised.
    If the cell ended differently on fresh ranks than on ranks that earlier cells had used, an earlier cell left state
    behind: ``pool_difference`` describes the failure on the used ranks, and all other fields describe the run on fresh
    ranks. ``rank_cpu_seconds`` is the CPU time of all ranks together, or None if a rank did not return or no rank ran.
    ``gpu_memory`` has the peaks of each rank, and is empty on a CPU.
    """

    cell: Cell
    seed: int
    verdict: Verdict
    engine_version: str
    torch_version: str
    seconds: float = 0.0
    tier: str | None = None
    ratio: float | None = None
    smallest_scale_error: float | None = None
    wrong_elements: int | None = None
    elements: int | None = None
    undetermined: int | None = None
    notes: tuple[str, ...] = ()
    divergence: Mismatch | None = None
    evidence: MismatchReport | None = field(default=None, hash=False)
    module_departures: str = ""
    cause: str = ""
    details: str = ""
    expected_failure: str = ""
    stale_reason: str = ""
    documentation_url: str = ""
    withheld_feature: str = ""
    raising_frame: str = ""
    pool_difference: str = ""
    rank_cpu_seconds: float | None = None
    gpu_memory: tuple[GpuMemory, ...] = ()

    @property
    def is_expected(self) -> bool:
        """Return whether this outcome is expected, so that it does not fail a run."""
        if self.stale_reason or self.pool_difference:
            return False
        if self.verdict is Verdict.UNDETERMINED:
            return False
        return not self.verdict.is_broken or bool(self.expected_failure)

    # Older names of fields, from before docs/glossary.md. Code that reads records may use them.
    case = property(lambda self: self.cell)
    expected = property(lambda self: self.is_expected)
    excuse = property(lambda self: self.expected_failure)
    stale = property(lambda self: self.stale_reason)
    documented = property(lambda self: self.documentation_url)
    withheld = property(lambda self: self.withheld_feature)
    smallest = property(lambda self: self.smallest_scale_error)
    modules = property(lambda self: self.module_departures)

    @property
    def command(self) -> str:
        """Return the shell command that runs this cell again.

        For a model or configuration that was passed to ``zharness.verify``, return a request to call
        ``zharness.verify`` again.
        """
        if any(part.startswith(f"{IN_PROCESS_PACKAGE}:") for part in (self.cell.model, self.cell.engine_variant)):
            return "call zharness.verify again with the same arguments"
        salt = f" --seed {self.seed}" if self.seed else ""
        return f"zharness check {shlex.quote(self.cell.id)}{salt}"

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain data for a JSON line; infinite and NaN floats become strings."""
        cell = self.cell
        plain = {
            "schema": SCHEMA,
            "case": cell.id,
            "check": cell.law,
            "model": cell.model,
            "variant": cell.variant,
            "engine": cell.engine,
            "engine_variant": cell.engine_variant,
            "engine_version": self.engine_version,
            "torch_version": self.torch_version,
            "stage": cell.stage,
            "world_size": cell.world_size,
            "dtype": cell.dtype,
            "seed": self.seed,
            "verdict": self.verdict.value,
            "excuse": self.expected_failure,
            "stale": self.stale_reason,
            "documented": self.documentation_url,
            "withheld": self.withheld_feature,
            "pool_difference": self.pool_difference,
            "tier": self.tier,
            "ratio": self.ratio,
            "smallest": self.smallest_scale_error,
            "wrong_elements": self.wrong_elements,
            "elements": self.elements,
            "undetermined": self.undetermined,
            "notes": list(self.notes),
            "divergence": divergence_as_json(self.divergence),
            "evidence": self.evidence,
            "modules": self.module_departures,
            "cause": self.cause,
            "raising_frame": self.raising_frame,
            "seconds": round(self.seconds, 4),
            "rank_cpu_seconds": None if self.rank_cpu_seconds is None else round(self.rank_cpu_seconds, 4),
            "gpu_memory": [[round(peak.allocated_mib, 2), round(peak.reserved_mib, 2)] for peak in self.gpu_memory],
            "command": self.command,
        }
        return {key: as_json_number(value) for key, value in plain.items()}


def divergence_as_json(mismatch: Mismatch | None) -> dict[str, Any] | None:
    """Return a mismatch as plain data, with its description under the key ``words``."""
    if mismatch is None:
        return None
    fields = {**asdict(mismatch), "part": mismatch.part.value, "words": mismatch.describe()}
    return {key: as_json_number(value) for key, value in fields.items()}


def as_json_number(value: Any) -> Any:
    """Return ``value``; convert a float that JSON cannot represent (infinity, NaN) to a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_record(line: str) -> Record:
    """Parse one JSON line. Raises UsageError for an unknown schema, a missing field, or a field of a wrong type."""
    try:
        plain = json.loads(line)
        if plain["schema"] != SCHEMA:
            raise UsageError(f"unknown record schema {plain['schema']!r}; this release reads schema {SCHEMA}")
        record = Record(
            cell=Cell.parse(plain["case"]),
            seed=plain["seed"],
            verdict=Verdict(plain["verdict"]),
            engine_version=plain["engine_version"],
            torch_version=plain["torch_version"],
            seconds=plain["seconds"],
            tier=plain["tier"],
            ratio=parse_json_number(plain["ratio"]),
            smallest_scale_error=parse_json_number(plain["smallest"]),
            wrong_elements=plain["wrong_elements"],
            elements=plain["elements"],
            undetermined=plain["undetermined"],
            notes=tuple(require_string_list(plain["notes"])),
            divergence=parse_mismatch(plain["divergence"]),
            evidence=parse_exhibit(plain.get("evidence")),  # missing in lines of older releases
            module_departures=plain["modules"],
            cause=plain["cause"],
            expected_failure=plain["excuse"],
            stale_reason=plain["stale"],
            documentation_url=plain["documented"],
            withheld_feature=plain.get("withheld", ""),  # missing in lines of older releases
            raising_frame=plain.get("raising_frame", ""),  # the same
            pool_difference=plain.get("pool_difference", ""),  # missing in lines of older releases
            rank_cpu_seconds=plain.get("rank_cpu_seconds"),  # the same
            gpu_memory=tuple(GpuMemory(*map(float, peaks)) for peaks in plain.get("gpu_memory", ())),  # the same
        )
        require_field_types(record)
        return record
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not a zharness record ({type(error).__name__}: {error}): {line[:80]!r}") from error


def parse_json_number(value: float | str | None) -> float | None:
    """Parse a number that may be written as a string."""
    return None if value is None else float(value)


def require_string_list(value: Any) -> list[str]:
    """Return ``value``. Raises TypeError unless it is a list of strings; a plain string would be split into letters."""
    require_type(value, list[str], "notes")
    return cast("list[str]", value)


def parse_mismatch(plain: dict[str, Any] | None) -> Mismatch | None:
    """Parse the output of ``divergence_as_json``."""
    if plain is None:
        return None
    fields = {key: value for key, value in plain.items() if key != "words"}
    fields.update(part=Part(plain["part"]), index=tuple(plain["index"]))
    for key in ("expected", "actual", "bound"):
        fields[key] = float(fields[key])
    mismatch = Mismatch(**fields)
    require_field_types(mismatch)
    return mismatch


def parse_exhibit(plain: Any) -> MismatchReport | None:
    """Return the evidence of a JSON line. Raises TypeError or ValueError if the evidence is malformed."""
    if plain is None:
        return None
    require_valid_exhibit(plain)
    return cast("MismatchReport", plain)


class JsonLine(Protocol):
    """An object that can be written as one JSON line."""

    def as_json(self) -> dict[str, Any]:
        """Return the object as plain data."""
        ...


class RecordFile:
    """A file of JSON lines. Each line is flushed immediately, so the file always contains all finished records."""

    def __init__(self, stream: FileIO, path: Path) -> None:
        self._stream = stream
        self._path = path

    def add(self, record: JsonLine) -> None:
        """Write one line and flush it to the operating system. Raises UsageError if the disk is full."""
        line = (json.dumps(record.as_json(), allow_nan=False) + "\n").encode()
        try:
            while line:  # the stream is unbuffered, so that no data is left whose write could fail again on close
                line = line[self._stream.write(line) :]
        except OSError as error:
            raise unwritable_error(self._path, error) from error


@contextmanager
def open_record_file(path: Path) -> Iterator[RecordFile]:
    """Open a RecordFile, which appears at ``path`` when the ``with`` block ends, even if the block raises.

    Until then the file's name is ``path`` + ``.partial``, so that no reader mistakes an unfinished run for a finished
    run, and a killed run still leaves its finished records. A terminal, pipe or device is written directly, because it
    must not be replaced. Raises UsageError if the file cannot be written.
    """
    path = path.resolve()
    in_place = path.exists() and not path.is_file()
    partial = path if in_place else partial_path(path)
    try:
        stream = partial.open("wb" if in_place else "ab", buffering=0)
    except OSError as error:
        raise unwritable_error(path, error) from error
    with stream:
        if not in_place:
            take_partial_file(stream, partial, path)
        try:
            yield RecordFile(stream, path)
        finally:
            if not in_place:
                os.replace(partial, path)


def take_partial_file(stream: FileIO, partial: Path, path: Path) -> None:
    """Lock and empty the file ``partial``, which ``stream`` has open. Raises UsageError if another run writes it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(stream.fileno()), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise UsageError(
            f"cannot write {str(path)!r}: another run is writing it; wait until it has ended, or name another file"
        )
    stream.truncate(0)
