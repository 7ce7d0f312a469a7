"""Convert records to columns of plain data, which the page's script reads."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from zharness.laws import LAWS
from zharness.parity import Part
from zharness.report.comparison import RunComparison
from zharness.report.overview import OUTCOME_LETTERS
from zharness.run.outcomes import OUTCOME_ORDER, outcome_name
from zharness.run.record import Record, as_json_number

# Texts that many records share: each text is stored once, and records refer to it by index.
TEXT_COLUMNS = (
    *("id", "check", "engine", "version", "torch", "dtype", "model", "variant", "outcome", "verdict", "tier", "notes"),
    *("cause", "details", "excuse", "stale", "documented", "withheld", "modules", "command"),
    "pool_difference",
)
NUMBER_COLUMNS = (
    *("stage", "world_size", "seconds", "ratio", "smallest", "wrong_elements", "elements", "undetermined"),
    "expected",
)
SPARSE_COLUMNS = ("divergence", "evidence")

# A letter for each outcome; fail, crash and hang share one letter in the terminal, but have three here.
OUTCOME_GLYPHS = {**OUTCOME_LETTERS, "pass": "·", "crash": "!", "hang": "H", "unsupported": "–"}
OUTCOME_MEANINGS = {
    "stale": "the law holds, but was expected to fail",
    "error": "the harness itself failed",
    "fail": "the law is broken: a number is wrong",
    "crash": "the engine raised an exception, or its process died",
    "hang": "the engine hung",
    "undetermined": "no wrong number was found, but most are smaller than their bound, which proves nothing",
    "leak": "the cell failed on ranks that earlier cells had used, and not on fresh ranks",
    "excused": "the law is broken, and was expected to be",
    "contract": "the law holds with the remedy that the engine documents",
    "unsupported": "the engine does not support the cell, or the law does not apply to this dtype",
    "pass": "the law holds",
}
# The parts of a training step; errors of unscaling and clipping are reported as the optimizer's.
STEP_PARTS = tuple(
    name for part in Part for name in (("unscale and clip", part.value) if part is Part.OPTIMIZER else (part.value,))
)


def record_as_row(record: Record) -> dict[str, Any]:
    """Return one record with the page's column names as keys; infinite and NaN floats become strings."""
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
    """Return the columns of the records.

    ``size`` is the number of records. ``texts`` contains dictionary-encoded columns, and ``numbers`` contains lists.
    ``sparse`` contains dictionaries from the index of a record to its value, without empty values.
    """
    rows = [record_as_row(record) for record in records]
    return {
        "size": len(rows),
        "texts": {name: encode_dictionary([row[name] for row in rows]) for name in TEXT_COLUMNS},
        "numbers": {name: [row[name] for row in rows] for name in NUMBER_COLUMNS},
        "sparse": {name: {i: row[name] for i, row in enumerate(rows) if row[name]} for name in SPARSE_COLUMNS},
    }


def encode_dictionary(texts: Sequence[str]) -> dict[str, Any]:
    """Encode texts as a list of distinct ``values``, and for each text its index in that list."""
    numbers: dict[str, int] = {}
    indices = [numbers.setdefault(text, len(numbers)) for text in texts]
    return {"values": list(numbers), "at": indices}


def describe_laws(records: Sequence[Record]) -> dict[str, str]:
    """Return the statement of each law among ``records`` that this release knows."""
    return {name: LAWS[name].statement for name in dict.fromkeys(r.cell.law for r in records) if name in LAWS}


def comparison_as_json(comparison: RunComparison, records: Sequence[Record]) -> dict[str, Any]:
    """Return the differences as rows of kind, index of the current record, and index of the earlier record.

    An index is None if the run lacks the cell. The index of a current record is its position in ``records``. The index
    of an earlier record is its position in the list ``before`` of the result.
    """
    before = [difference.before for difference in comparison.differences if difference.before is not None]
    current_index, earlier_index = ({record: i for i, record in enumerate(group)} for group in (records, before))
    return {
        "before": records_as_columns(before),
        "turns": [[kind.value, count] for kind, count in comparison.count_by_kind().items()],
        "rows": [
            [
                difference.kind.value,
                None if difference.after is None else current_index[difference.after],
                None if difference.before is None else earlier_index[difference.before],
            ]
            for difference in comparison.differences
        ],
        "words": comparison.describe(),
    }


def build_payload(
    records: Sequence[Record], skipped: Sequence[str], comparison: RunComparison | None
) -> dict[str, Any]:
    """Return all data of the page."""
    return {
        "records": records_as_columns(records),
        "laws": describe_laws(records),
        "step": STEP_PARTS,
        "outcomes": [[name, OUTCOME_GLYPHS[name], OUTCOME_MEANINGS[name]] for name in OUTCOME_ORDER],
        "skipped": list(skipped),
        "comparison": None if comparison is None else comparison_as_json(comparison, records),
    }


def compress_payload(plain: Mapping[str, Any]) -> str:
    """Return the data as JSON, deflated (RFC 1950) and base64-encoded.

    The result has a quarter of the size of plain JSON, and cannot contain the end tag of a script element.
    """
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode("ascii")


def as_json_numbers(value: Any) -> Any:
    """Return ``value`` with every infinite or NaN float converted to a string, at any depth."""
    if isinstance(value, Mapping):
        return {key: as_json_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json_numbers(item) for item in value]
    return as_json_number(value)
