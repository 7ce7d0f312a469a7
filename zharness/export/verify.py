"""Whether a script shows what its cell showed: run under torchrun, and its verdict held against the record's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zharness.run.record import Record, Verdict

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"


@dataclass(frozen=True)
class ScriptResult:
    """What a script's run came to (``reproduced``, ``not reproduced`` or another word) and the line that says so."""

    verdict: str
    evidence: str


RunScript = Callable[[Path], ScriptResult]  # a script on the engine's release, to its end


def is_faithful(record: Record, result: ScriptResult) -> bool:
    """Whether the script's verdict is the cell's."""
    if record.verdict is Verdict.PASS:
        return result.verdict == NOT_REPRODUCED
    if "was ended by a signal" in record.cause:
        return result.evidence.startswith("Signal ")
    return result.verdict == REPRODUCED


def describe_verification(record: Record, result: ScriptResult) -> str:
    """One sentence for a person."""
    cell = f"the cell: {record.verdict.value}" + (f" ({record.cause})" if record.cause else "")
    script = f"the script: {result.verdict} ({result.evidence})"
    said = (
        "shows the same verdict"
        if is_faithful(record, result)
        else "does NOT show it, so do not pass it on as this cell"
    )
    return f"{cell}\n{script}\nrun under torchrun, it {said}"
