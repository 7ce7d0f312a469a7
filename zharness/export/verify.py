"""Whether a script shows what its cell showed: run under torchrun, and its verdict held against the record's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zharness.run.record import Record, Verdict

REPRODUCED, ABSENT = "reproduced", "not reproduced"


@dataclass(frozen=True)
class Shown:
    """What a script's run came to (``reproduced``, ``not reproduced`` or another word) and the line that says so."""

    verdict: str
    evidence: str


Run = Callable[[Path], Shown]  # a script on the engine's release, to its end


def faithful(record: Record, shown: Shown) -> bool:
    """Whether the script's verdict is the cell's."""
    if record.verdict is Verdict.PASS:
        return shown.verdict == ABSENT
    if "was ended by a signal" in record.cause:
        return shown.evidence.startswith("Signal ")
    return shown.verdict == REPRODUCED


def words(record: Record, shown: Shown) -> str:
    """One sentence for a person."""
    cell = f"the cell: {record.verdict.value}" + (f" ({record.cause})" if record.cause else "")
    script = f"the script: {shown.verdict} ({shown.evidence})"
    said = (
        "shows the same verdict" if faithful(record, shown) else "does NOT show it, so do not pass it on as this cell"
    )
    return f"{cell}\n{script}\nrun under torchrun, it {said}"
