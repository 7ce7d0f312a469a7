"""Write the first ``zharness.toml`` of an engine's repository from the records of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.law_set import read_versions
from zharness.project_file import FILE_NAME
from zharness.report.failure_groups import group_failures, remove_cell_details
from zharness.run.record import Record

MIN_SIGNATURE = 12  # characters; a shorter text would match other failures, too
_PLACEHOLDER = re.compile(r"\b(?:NAME|N|CONFIGURATION)\b")
_RANK = re.compile(r"^rank \d+ raised: ")

HEAD = """\
# The options with which this repository runs `zharness check`, and the failures that it expects.
# `zharness init` wrote this file from the records of a run. Give each expected failure its issue and reason; delete the
# entries of failures that are mended: an entry that no longer fails makes the run fail.
"""


def write_project_file(records: Sequence[Record], folder: Path) -> tuple[Path, int]:
    """Write ``zharness.toml`` into ``folder``, and return its path and the number of expected failures in it.

    Raises UsageError if the file exists, or if the records are of several engines or of none.
    """
    path = folder / FILE_NAME
    engines = sorted({split_release(record.cell.engine)[0] for record in records})
    if len(engines) != 1:
        raise UsageError(f"got records of {len(engines)} engines ({', '.join(engines)}); expected those of one engine")
    entries = list(render_entries(records))
    text = "\n".join((HEAD + f"engine = {quote(engines[0])}\n", render_options(records), *entries))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; delete it, or run `zharness init` in another folder") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    return path, len(entries)


def render_options(records: Sequence[Record]) -> str:
    """Return the table ``[check]``: the stages of the records, and the newest version of the law set."""
    stages = sorted({record.cell.stage for record in records})
    return f"[check]\nstage = {json.dumps(stages)}\nlaws = {quote(read_versions()[-1].name)}\n"


def render_entries(records: Sequence[Record]) -> Iterator[str]:
    """Yield a table ``[[expected_failure]]`` for each cause of unexpected failures in ``records``."""
    failed = [record for record in records if record.verdict.is_broken and not record.is_expected]
    for group in group_failures(failed):
        first = group[0]
        keys = {
            "law": sorted({record.cell.law for record in group}),
            "variants": list_narrowing([record.cell.variant for record in group]),
            "engine_variants": list_narrowing([record.cell.engine_variant for record in group]),
            "upstream": "no report known",
            "reason": first.cause,
            "verdict": first.verdict.value,
            "signatures": list(dict.fromkeys(map(find_signature, group))),
        }
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items() if value]
        yield "\n".join(("[[expected_failure]]", *lines, ""))


def list_narrowing(values: Sequence[str]) -> list[str]:
    """Return the different ``values`` that narrow an entry, or no value if one of them is the default."""
    return sorted(set(values)) if all(values) else []


def find_signature(record: Record) -> str:
    """Return a text of the record's cause that does not depend on the cell's numbers.

    It is the longest piece between numbers and names, of the hint of a mismatch or of an exception's message. For a
    mismatch without a hint it is the part of the step and the parameter.
    """
    mismatch = record.divergence
    text = mismatch.hint if mismatch is not None else _RANK.sub("", record.cause)
    pieces = chain.from_iterable(_PLACEHOLDER.split(remove_cell_details(line)) for line in text.splitlines())
    longest = max((piece.strip() for piece in pieces), key=len, default="")
    if len(longest) >= MIN_SIGNATURE and longest in record.cause:
        return longest
    return record.cause.splitlines()[0] if mismatch is None else f"{mismatch.part.value}: {mismatch.parameter}"


def quote(text: str) -> str:
    """Return ``text`` as a basic string of TOML, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)
