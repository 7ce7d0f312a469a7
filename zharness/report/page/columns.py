"""Records as columns of plain data: what the page's script reads."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from zharness.laws import LAWS
from zharness.parity import Part
from zharness.report.comparison import RunComparison
from zharness.report.matrix import OUTCOME_ORDER, outcome_name
from zharness.report.overview import OUTCOME_LETTERS
from zharness.run.record import Record

# Texts that many records share: stored once, and by number in each record.
TEXT_COLUMNS = (
    *("id", "check", "engine", "version", "torch", "dtype", "model", "variant", "outcome", "verdict", "tier", "notes"),
    *("cause", "details", "excuse", "stale", "documented", "withheld", "modules", "command"),
)
NUMBER_COLUMNS = (
    *("stage", "world_size", "seconds", "ratio", "smallest", "wrong_elements", "elements", "undetermined"),
    "expected",
)
SPARSE_COLUMNS = ("divergence", "evidence")

# A letter for each outcome; fail, crash and hang, one in the terminal's overview, are three here.
OUTCOME_GLYPHS = {**OUTCOME_LETTERS, "pass": "·", "crash": "!", "hang": "H", "unsupported": "–"}
OUTCOME_MEANINGS = {
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
STEP_PARTS = tuple(
    word for part in Part for word in (("unscale and clip", part.value) if part is Part.OPTIMIZER else (part.value,))
)


def record_as_row(record: Record) -> dict[str, Any]:
    """One record as the page names its parts; numbers that JSON lacks are strings."""
    plain = record.as_json()
    return {
        **plain,
        "id": record.cell.id,
        "engine": record.cell.engine_label,
        "version": record.engine_version,
        "torch": record.torch_version,
        "outcome": outcome_name(record),
        "tier": record.tier or "",
        "notes": "\n".join(record.notes),
        "details": record.details,
        "expected": int(record.is_expected),
        "evidence": as_json_numbers(plain["evidence"]),
    }


def records_as_columns(records: Sequence[Record]) -> dict[str, Any]:
    """``size`` records: texts each once with the places that name them, numbers, and what few records have."""
    rows = [record_as_row(record) for record in records]
    return {
        "size": len(rows),
        "texts": {name: encode_dictionary([each[name] for each in rows]) for name in TEXT_COLUMNS},
        "numbers": {name: [each[name] for each in rows] for name in NUMBER_COLUMNS},
        "sparse": {name: {i: each[name] for i, each in enumerate(rows) if each[name]} for name in SPARSE_COLUMNS},
    }


def encode_dictionary(texts: Sequence[str]) -> dict[str, Any]:
    """Every text once, and for each place its number."""
    numbers: dict[str, int] = {}
    at = [numbers.setdefault(text, len(numbers)) for text in texts]
    return {"values": list(numbers), "at": at}


def describe_laws(records: Sequence[Record]) -> dict[str, str]:
    """What each check among ``records`` demands; nothing of a check that this release does not know."""
    return {name: LAWS[name].statement for name in dict.fromkeys(r.cell.law for r in records) if name in LAWS}


def comparison_as_json(comparison: RunComparison, records: Sequence[Record]) -> dict[str, Any]:
    """What differs: the earlier records that it is told with, and rows of turn, number now, number before.

    A number is None where that run has no such cell. What is told of now has to be among ``records``.
    """
    before = [each.before for each in comparison.differences if each.before is not None]
    now, then = ({record: number for number, record in enumerate(some)} for some in (records, before))
    return {
        "before": records_as_columns(before),
        "turns": [[turn.value, count] for turn, count in comparison.count_by_kind().items()],
        "rows": [
            [
                each.kind.value,
                None if each.after is None else now[each.after],
                None if each.before is None else then[each.before],
            ]
            for each in comparison.differences
        ],
        "words": comparison.describe(),
    }


def build_payload(
    records: Sequence[Record], skipped: Sequence[str], comparison: RunComparison | None
) -> dict[str, Any]:
    """All that the page shows."""
    return {
        "records": records_as_columns(records),
        "laws": describe_laws(records),
        "step": STEP_PARTS,
        "outcomes": [[word, OUTCOME_GLYPHS[word], OUTCOME_MEANINGS[word]] for word in OUTCOME_ORDER],
        "skipped": list(skipped),
        "comparison": None if comparison is None else comparison_as_json(comparison, records),
    }


def compress_payload(plain: Mapping[str, Any]) -> str:
    """JSON, deflated (RFC 1950) and in base64: a quarter of the size, and nothing in it can end a script element."""
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode("ascii")


def as_json_numbers(value: Any) -> Any:
    """``value`` with every float that JSON lacks as a string, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: as_json_numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json_numbers(each) for each in value]
    return value
