"""Read the names of laws, models and mutants from a file, because importing the laws takes seconds.

The file ``name_index.json`` has a fingerprint of the sources. If the sources have changed since, the names are read
from the laws, and kept in the cache folder. ``python -m zharness.cli.name_index`` writes the file again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from zharness import engines
from zharness.cell import Cell, is_cell_id, refuse_partial_ids
from zharness.engines.registry import BUILT_IN
from zharness.errors import UsageError
from zharness.names import (
    matches_pattern,
    require_dtypes,
    require_law,
    require_laws,
    require_model,
    require_mutants,
    require_stages,
)
from zharness.releases.overlay import cache_folder

PACKAGE = Path(__file__).parents[1]
INDEX_FILE = Path(__file__).with_name("name_index.json")
SOURCES = ("cell.py", "law_kit", "laws", "mutants", "workload", "report/listing.py", "report/listing_rows.py")
FACTORY_PATH = re.compile(r"[\w.]+:.+")

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class NameIndex:
    """The rows of ``zharness list``, and the names that commands accept.

    ``killed`` maps each law to the mutants that it has to kill.
    """

    fingerprint: str
    laws: Rows
    models: Rows
    mutants: Rows
    killed: dict[str, list[str]]
    dtypes: list[str]

    @property
    def law_names(self) -> list[str]:
        """Return the name of every law."""
        return [row["check"] for row in self.laws]


def compute_fingerprint() -> str:
    """Return a hash of the sources that define laws, models and mutants."""
    digest = sha256()
    for source in SOURCES:
        path = PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def build_index(fingerprint: str) -> NameIndex:
    """Return the index of the laws, models and mutants of this process. This imports torch."""
    from zharness.law_kit.dtypes import KNOWN_DTYPES
    from zharness.report.listing_rows import killed_mutants, law_rows, model_rows, mutant_rows

    return NameIndex(fingerprint, law_rows(), model_rows(), mutant_rows(), killed_mutants(), list(KNOWN_DTYPES))


def load_index() -> NameIndex:
    """Return the index of the sources as they are now, from the package, from the cache, or from the laws."""
    fingerprint = compute_fingerprint()
    cached = cache_folder() / f"names-{fingerprint}.json"
    for path in (INDEX_FILE, cached):
        with suppress(OSError, ValueError, TypeError):
            index = NameIndex(**json.loads(path.read_text(encoding="utf-8")))
            if index.fingerprint == fingerprint:
                return index
    index = build_index(fingerprint)
    with suppress(OSError):  # if the cache cannot be written, the next call is slow, but every name is right
        for outdated in cache_folder().glob("names-*.json"):
            outdated.unlink()
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(asdict(index)), encoding="utf-8")
    return index


def write_index() -> None:
    """Write the index of the laws as they are now into the package."""
    text = json.dumps(asdict(build_index(compute_fingerprint())), indent=1)
    INDEX_FILE.write_text(text + "\n", encoding="utf-8")


def require_known_names(
    *,
    engine_names: Iterable[str] = (),
    laws: Sequence[str] = (),
    models: Iterable[str] = (),
    mutants: Sequence[str] = (),
    stages: Sequence[int] = (),
    dtypes: Sequence[str] = (),
) -> None:
    """Raise UsageError for a name that no command could accept, before anything slow is imported.

    ``laws`` are laws, groups, globs and cell ids; ``mutants`` are names and globs. A name is accepted if only a slower
    check could find it wrong.
    """
    for engine in engine_names:
        engines.require(engine)
    require_stages(stages)
    built_in = [name for name in models if not FACTORY_PATH.fullmatch(name)]
    if not (laws or built_in or mutants or dtypes):
        return
    index = load_index()
    require_dtypes(dtypes, index.dtypes)
    for model in built_in:
        require_model(model, [row["model"] for row in index.models])
    require_mutants(mutants, [row["mutant"] for row in index.mutants])
    patterns = [pattern for pattern in laws if not is_cell_id(pattern)]
    refuse_partial_ids(patterns)
    refuse_other_names(patterns, index.law_names)
    require_laws(patterns, index.law_names)
    for pattern in filter(is_cell_id, laws):
        require_cell(Cell.parse(pattern), index)


def refuse_other_names(patterns: Iterable[str], laws: Sequence[str]) -> None:
    """Raise UsageError for a pattern that names an engine and matches none of ``laws``."""
    for pattern in patterns:
        if any(matches_pattern(name, pattern) for name in laws):
            continue
        if re.split("[=@]", pattern, maxsplit=1)[0] in BUILT_IN or FACTORY_PATH.fullmatch(pattern):
            raise UsageError(f"got {pattern!r} as a law; to check this engine, give --engine {pattern}")


def require_cell(cell: Cell, index: NameIndex) -> None:
    """Raise UsageError if the law, engine, stage, dtype or model of ``cell`` does not exist."""
    require_law(cell.law, index.law_names)
    engines.require(cell.engine)
    require_stages((cell.stage,))
    require_dtypes((cell.dtype,), index.dtypes)
    if not FACTORY_PATH.fullmatch(cell.model):
        require_model(cell.model, [row["model"] for row in index.models])


if __name__ == "__main__":
    write_index()
