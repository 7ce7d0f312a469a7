"""One line for each cell: what was asked, what came out, and how to see it again."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.parity import Mismatch, Part
from zharness.parity.mismatch_report import MismatchReport
from zharness.run.validation import require_field_types, require_type, require_valid_exhibit
from zharness.workload.user_model import IN_PROCESS_PACKAGE

SCHEMA = 2


class Verdict(Enum):
    """What became of a cell."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"  # a number is wrong
    CONTRACT = "contract"  # the engine documents that it differs, and its documented remedy passes
    CRASH = "crash"  # the engine raised, or took its process down
    HANG = "hang"
    ERROR = "error"  # the harness itself failed
    UNDETERMINED = "undetermined"  # no number is wrong, and most are smaller than their bound: nothing was shown
    UNSUPPORTED = "unsupported"

    @property
    def is_broken(self) -> bool:
        """Whether the law does not hold."""
        return self in (Verdict.FAIL, Verdict.CRASH, Verdict.HANG)


@dataclass(frozen=True)
class Record:
    """A cell's outcome.

    ``excuse`` names the upstream issue of an expected failure; ``stale`` says that the excuse no longer holds and which
    one to delete. ``tier``, ``ratio`` (error over bound), ``smallest`` (the smallest relative scale error that would
    have been caught), ``wrong_elements`` (so many lost elements of one tensor would have been caught) and
    ``undetermined`` of ``elements`` (smaller than their bound) are None where nothing was compared. ``notes`` say what
    a reader has to know: why a tier is not the promised one. ``evidence`` is what a wrong number has to show, as plain
    data. ``modules`` are the first that depart from the baseline's
    where what a rank computes on its own is wrong. ``cause`` is one line, ``details`` every rank's report. ``withheld``
    is a feature that the engine does not claim although the law holds, where that was tried.
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

    @property
    def is_expected(self) -> bool:
        """Whether this outcome is no reason to fail a run."""
        if self.stale_reason:
            return False
        if self.verdict is Verdict.UNDETERMINED:
            return False
        return not self.verdict.is_broken or bool(self.expected_failure)

    @property
    def command(self) -> str:
        """The one command that shows this cell again; in words where what was handed to a library call is needed."""
        if any(part.startswith(f"{IN_PROCESS_PACKAGE}:") for part in (self.cell.model, self.cell.engine_variant)):
            return "call zharness.verify again, as this process did"
        salt = f" --seed {self.seed}" if self.seed else ""
        return f"zharness check {shlex.quote(self.cell.id)}{salt}"

    def as_json(self) -> dict[str, Any]:
        """Plain data for a JSON line; infinities become strings, for JSON has none."""
        case = self.cell
        plain = {
            "schema": SCHEMA,
            "case": case.id,
            "check": case.law,
            "model": case.model,
            "variant": case.variant,
            "engine": case.engine,
            "engine_variant": case.engine_variant,
            "engine_version": self.engine_version,
            "torch_version": self.torch_version,
            "stage": case.stage,
            "world_size": case.world_size,
            "dtype": case.dtype,
            "seed": self.seed,
            "verdict": self.verdict.value,
            "excuse": self.expected_failure,
            "stale": self.stale_reason,
            "documented": self.documentation_url,
            "withheld": self.withheld_feature,
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
            "seconds": round(self.seconds, 4),
            "command": self.command,
        }
        return {key: as_json_number(value) for key, value in plain.items()}


def divergence_as_json(mismatch: Mismatch | None) -> dict[str, Any] | None:
    """A mismatch as plain data, with its sentence."""
    if mismatch is None:
        return None
    fields = {**asdict(mismatch), "part": mismatch.part.value, "words": mismatch.describe()}
    return {key: as_json_number(value) for key, value in fields.items()}


def as_json_number(value: Any) -> Any:
    """``value``, with a float that JSON cannot hold as a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_record(line: str) -> Record:
    """The record of one JSON line. Raises UsageError for a line of another schema, another kind, or other types."""
    try:
        plain = json.loads(line)
        if plain["schema"] != SCHEMA:
            raise UsageError(f"record schema {plain['schema']!r} is not known; this release reads schema {SCHEMA}")
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
            evidence=parse_exhibit(plain.get("evidence")),  # so have they none of this
            module_departures=plain["modules"],
            cause=plain["cause"],
            expected_failure=plain["excuse"],
            stale_reason=plain["stale"],
            documentation_url=plain["documented"],
            withheld_feature=plain.get("withheld", ""),  # lines of before it was there have none
        )
        require_field_types(record)
        return record
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"not a zharness record ({type(error).__name__}: {error}): {line[:80]!r}") from error


def parse_json_number(value: float | str | None) -> float | None:
    """A float that may have been written as a string."""
    return None if value is None else float(value)


def require_string_list(value: Any) -> list[str]:
    """A list of texts; one text alone would be taken for a list of its letters."""
    require_type(value, list[str], "notes")
    return cast("list[str]", value)


def parse_mismatch(plain: dict[str, Any] | None) -> Mismatch | None:
    """The inverse of ``divergence_as_json``."""
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
    """``plain`` itself, which is what it was written from. Raises TypeError or ValueError for another form."""
    if plain is None:
        return None
    require_valid_exhibit(plain)
    return cast("MismatchReport", plain)


class JsonLine(Protocol):
    """What can become one JSON line."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        ...


class RecordFile:
    """JSON lines, one at a time, complete at every moment."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, record: JsonLine) -> None:
        """Append one line and hand it to the operating system."""
        self._stream.write(json.dumps(record.as_json(), allow_nan=False) + "\n")
        self._stream.flush()


@contextmanager
def open_record_file(path: Path) -> Iterator[RecordFile]:
    """A RecordFile that appears under ``path`` when the block ends, also by an interrupt.

    A name that stands for a terminal, a pipe or a device is written to as it is: such a thing must not be replaced.
    Until then it is ``path`` with ``.partial`` behind it, so that a reader never meets half a run under the real name,
    and a killed run still leaves what it had finished. Raises UsageError when it cannot be written.
    """
    path = path.resolve()
    in_place = path.exists() and not path.is_file()
    partial = path if in_place else path.with_name(path.name + ".partial")
    try:
        stream = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}; name a writable place") from error
    try:
        with stream:
            yield RecordFile(stream)
    finally:
        if not in_place:
            os.replace(partial, path)
