"""Check that an exported script shows the same verdict as its cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zharness.run.record import Record, Verdict

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"


@dataclass(frozen=True)
class ScriptResult:
    """The verdict of a script's run, and the line of the output from which the verdict follows.

    ``verdict`` is ``reproduced``, ``not reproduced`` or, if the run shows neither, another text.
    """

    verdict: str
    evidence: str


RunScript = Callable[[Path], ScriptResult]  # runs a script on the engine's release to its end


def is_faithful(record: Record, result: ScriptResult) -> bool:
    """Return whether ``result``, the result of running the script, agrees with the verdict of ``record``."""
    if record.verdict is Verdict.PASS:
        return result.verdict == NOT_REPRODUCED
    if "was ended by a signal" in record.cause:
        return result.evidence.startswith("Signal ")
    return result.verdict == REPRODUCED


def describe_verification(record: Record, result: ScriptResult) -> str:
    """Return a text that states the cell's verdict, the script's verdict, and whether the two verdicts agree."""
    cell = f"the cell: {record.verdict.value}" + (f" ({record.cause})" if record.cause else "")
    script = f"the script: {result.verdict} ({result.evidence})"
    conclusion = (
        "shows the same verdict"
        if is_faithful(record, result)
        else "does NOT show the same verdict, so do not publish it as this cell"
    )
    return f"{cell}\n{script}\nunder torchrun, the script {conclusion}"
