"""Records as columns of plain data: what the page's script reads."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from zharness.checks import CHECKS
from zharness.parity import Part
from zharness.report.comparison import Comparison
from zharness.report.matrix import ORDER, outcome
from zharness.report.overview import LETTERS
from zharness.run.record import Record

# Texts that many records share: stored once, and by number in each record.
TEXTS = (
    *("id", "check", "engine", "version", "torch", "dtype", "model", "variant", "outcome", "verdict", "tier", "notes"),
    *("cause", "details", "excuse", "stale", "documented", "withheld", "modules", "command"),
)
NUMBERS = (
    *("stage", "world_size", "seconds", "ratio", "smallest", "wrong_elements", "elements", "undetermined"),
    "expected",
)
SPARSE = ("divergence", "evidence")

# A letter for each outcome; fail, crash and hang, one in the terminal's overview, are three here.
GLYPHS = {**LETTERS, "pass": "·", "crash": "!", "hang": "H", "unsupported": "–"}
MEANINGS = {
    "stale": "an excuse that no longer holds",
    "error": "the harness itself failed",
    "fail": "the law does not hold: a number is wrong",
    "crash": "the engine raised, or took its process down",
    "hang": "the engine hung",
    "undetermined": "no number is wrong, and most are smaller than their bound: nothing was shown",
    "excused": "the law does not hold, and an excuse says so",
    "contract": "the law holds with the remedy that the engine documents",
    "unsupported": "not claimed by the engine, or not stated for this dtype",
    "pass": "the law holds",
}
# The parts of a training step as a reader knows them; clipping's errors are told as the optimizer's.
STEP = tuple(
    word for part in Part for word in (("unscale and clip", part.value) if part is Part.OPTIMIZER else (part.value,))
)


def row(record: Record) -> dict[str, Any]:
    """One record as the page names its parts; numbers that JSON lacks are strings."""
    plain = record.as_json()
    return {
        **plain,
        "id": record.case.id,
        "engine": record.case.subject,
        "version": record.engine_version,
        "torch": record.torch_version,
        "outcome": outcome(record),
        "tier": record.tier or "",
        "notes": "\n".join(record.notes),
        "details": record.details,
        "expected": int(record.expected),
        "evidence": finite(plain["evidence"]),
    }


def columns(records: Sequence[Record]) -> dict[str, Any]:
    """``size`` records: texts each once with the places that name them, numbers, and what few records have."""
    rows = [row(record) for record in records]
    return {
        "size": len(rows),
        "texts": {name: dictionary([each[name] for each in rows]) for name in TEXTS},
        "numbers": {name: [each[name] for each in rows] for name in NUMBERS},
        "sparse": {name: {i: each[name] for i, each in enumerate(rows) if each[name]} for name in SPARSE},
    }


def dictionary(texts: Sequence[str]) -> dict[str, Any]:
    """Every text once, and for each place its number."""
    numbers: dict[str, int] = {}
    at = [numbers.setdefault(text, len(numbers)) for text in texts]
    return {"values": list(numbers), "at": at}


def laws(records: Sequence[Record]) -> dict[str, str]:
    """What each check among ``records`` demands; nothing of a check that this release does not know."""
    return {name: CHECKS[name].law for name in dict.fromkeys(r.case.check for r in records) if name in CHECKS}


def compared(comparison: Comparison, records: Sequence[Record]) -> dict[str, Any]:
    """What differs: the earlier records that it is told with, and rows of turn, number now, number before.

    A number is None where that run has no such cell. What is told of now has to be among ``records``.
    """
    before = [each.before for each in comparison.differences if each.before is not None]
    now, then = ({record: number for number, record in enumerate(some)} for some in (records, before))
    return {
        "before": columns(before),
        "turns": [[turn.value, count] for turn, count in comparison.counts().items()],
        "rows": [
            [
                each.turn.value,
                None if each.after is None else now[each.after],
                None if each.before is None else then[each.before],
            ]
            for each in comparison.differences
        ],
        "words": comparison.words(),
    }


def payload(records: Sequence[Record], skipped: Sequence[str], comparison: Comparison | None) -> dict[str, Any]:
    """All that the page shows."""
    return {
        "records": columns(records),
        "laws": laws(records),
        "step": STEP,
        "outcomes": [[word, GLYPHS[word], MEANINGS[word]] for word in ORDER],
        "skipped": list(skipped),
        "comparison": None if comparison is None else compared(comparison, records),
    }


def packed(plain: Mapping[str, Any]) -> str:
    """JSON, deflated (RFC 1950) and in base64: a quarter of the size, and nothing in it can end a script element."""
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode("ascii")


def finite(value: Any) -> Any:
    """``value`` with every float that JSON lacks as a string, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
