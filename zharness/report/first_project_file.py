"""Write the first ``zharness.toml`` of an engine's repository from the records of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.law_set import read_versions
from zharness.project_file import FILE_NAME
from zharness.report.failure_groups import group_failures, remove_cell_details
from zharness.run.expected_failures import parse_entry
from zharness.run.record import Record, Verdict

DEFAULT_WORLD_SIZE, DEFAULT_DTYPE = 2, "fp32"
# The keys that narrow an entry, and the fields of a cell from which their values are taken.
AXES = {
    "stages": "stage",
    "variants": "variant",
    "models": "model",
    "dtypes": "dtype",
    "world_sizes": "world_size",
    "meshes": "mesh",
    "engine_variants": "engine_variant",
}
MIN_SIGNATURE = 12  # characters; a shorter text would also match other failures
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
    """Return the table ``[check]``: the newest version of the law set, and the options of the records.

    The options are the stages, the mesh, and world sizes and dtypes if no record has the default.
    """
    cells = [record.cell for record in records]
    sizes, dtypes = sorted({cell.world_size for cell in cells}), sorted({cell.dtype for cell in cells})
    meshes = sorted({cell.mesh.label for cell in cells})
    if len(meshes) > 1:
        raise UsageError(f"got records of {len(meshes)} meshes; expected those of one mesh")
    options = {
        "stage": sorted({cell.stage for cell in cells}),
        "world-size": [] if DEFAULT_WORLD_SIZE in sizes else sizes,
        "mesh": [part for part in meshes[0].split(".") if part],
        "dtype": [] if DEFAULT_DTYPE in dtypes else dtypes,
        "laws": read_versions()[-1].name,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items() if value]
    return "\n".join(("[check]", *lines, ""))


def render_entries(records: Sequence[Record]) -> Iterator[str]:
    """Yield one or several tables ``[[expected_failure]]`` for each cause of unexpected failures in ``records``."""
    failed = [record for record in records if record.verdict.is_broken and not record.is_expected]
    passed = [record.cell for record in records if record.verdict is Verdict.PASS]
    for group in group_failures(failed):
        for keys in make_entries(group, passed):
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items() if value]
            yield "\n".join(("[[expected_failure]]", *lines, ""))


def make_entries(group: Sequence[Record], passed: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield entries that cover ``group``, the records of one cause, but no cell of ``passed`` that makes them stale.

    One entry is narrowed by one axis after the other until it fits. If no axis makes it fit, the group is split by the
    values of an axis, and each part gets entries of its own.
    """
    cells = [record.cell for record in group]
    for count in range(len(AXES) + 1):
        keys = make_entry(group, tuple(AXES)[:count])
        entry = parse_entry({"engine": split_release(cells[0].engine)[0], **keys}, "")
        if not any(entry.covers_cell(cell, "") and entry.is_stale_on(cell) for cell in passed):
            yield keys
            return
    for axis in ("law", *AXES):
        values = sorted({read_axis(cell, axis) for cell in cells})
        if len(values) > 1:
            for value in values:
                yield from make_entries([each for each in group if read_axis(each.cell, axis) == value], passed)
            return
    yield keys  # the same cell has failed and passed


def make_entry(group: Sequence[Record], narrowed: Sequence[str]) -> dict[str, Any]:
    """Return the keys of an entry for the records of ``group``, with their values on each axis of ``narrowed``.

    Variants and meshes are also named if none of them is the default.
    """
    first = group[0]
    values = {axis: sorted({read_axis(record.cell, axis) for record in group}) for axis in AXES}
    named = (axis for axis in ("variants", "meshes", "engine_variants") if "" not in values[axis])
    return {
        "law": sorted({record.cell.law for record in group}),
        **{axis: values[axis] for axis in dict.fromkeys((*narrowed, *named))},
        "upstream": "no report known",
        "reason": first.cause,
        "verdict": first.verdict.value,
        "signatures": list(dict.fromkeys(map(find_signature, group))),
    }


def read_axis(cell: Cell, axis: str) -> Any:
    """Return the value of ``cell`` for a key of an entry."""
    return cell.mesh.label if axis == "meshes" else getattr(cell, AXES.get(axis, axis))


def find_signature(record: Record) -> str:
    """Return a text of the record's cause that does not depend on the cell's numbers.

    The text is the longest piece between numbers and names in the hint of a mismatch or in an exception's message. For
    a mismatch without a hint, the text is the part of the step and the parameter.
    """
    mismatch = record.divergence
    text = mismatch.hint if mismatch is not None else _RANK.sub("", record.cause)
    pieces = chain.from_iterable(_PLACEHOLDER.split(remove_cell_details(line)) for line in text.splitlines())
    longest = max((piece.strip() for piece in pieces), key=len, default="")
    if len(longest) >= MIN_SIGNATURE and longest in record.cause:
        return longest
    return record.cause.splitlines()[0] if mismatch is None else f"{mismatch.part.value}: {mismatch.parameter}"


def quote(text: str) -> str:
    """Return ``text`` as a basic string of TOML, which has the same escapes as JSON."""
    return json.dumps(text, ensure_ascii=False)
