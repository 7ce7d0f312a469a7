"""Parse expected failures, and match cells with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from zharness.cell import Cell
from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.law_kit.given_programs import split_variant
from zharness.law_kit.setting import SEPARATOR
from zharness.laws.registry import find_laws
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.names import matches_pattern
from zharness.project_file import drop_option_tables
from zharness.run.configuration import is_config_file
from zharness.toml_text import parse_toml
from zharness.workload.user_model import is_user_model

VERDICTS = ("fail", "crash", "hang")
REQUIRED_KEYS = ("upstream", "reason", "verdict", "signatures")
LIST_KEYS: Mapping[str, type] = {
    **dict.fromkeys(("stages", "world_sizes"), int),
    **dict.fromkeys(("meshes", "dtypes", "models", "variants", "engine_variants", "signatures", "details"), str),
    "unless_engine_variants": str,
}
FLAG_KEYS = ("user_models",)
STRING_KEYS = (
    *("engine", "law", "check", "upstream", "reason", "verdict", "releases", "documented", "isolation"),
    "data_coordinates",
)
POOLED = "pooled"
ONE, SEVERAL = "one", "several"  # data coordinates of a mesh
DEFAULT_KEYS = ("engine", "releases")  # keys above the tables, for tables that do not set them
AROUND = "around"  # a key above the tables of a user's file: the engine on which the engine of the file is built
TABLES = ("expected_failure", "excuse")  # the second is the older name, as ``check`` is the older name of ``law``
NUMBER = "{number}"  # in a signature: any number, such as one that depends on the weights of a seed
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)"
_OPEN_VALUE = re.compile(r"(expected|got) \{number\}|\{number\} x the right ")
_HEADER = re.compile(rf"\s*\[\[\s*({'|'.join(TABLES)})\s*\]\]\s*(#.*)?")


@dataclass(frozen=True)
class ExpectedFailure:
    """One entry of a file: the cells that are known to fail, the reason, and the expected verdict and cause.

    The entry covers the laws ``check`` and ``further_laws``, each a name, a group or a glob.
    An empty tuple matches every value, but without ``meshes`` an entry covers no cell of a mesh. An axis of a mesh
    without a size, such as ``pp`` in ``pp.tp2``, matches any size. ``data_coordinates`` is ONE or SEVERAL if a cell has
    to have one or several data coordinates, or ''. Each text of ``engine_variants`` is one part of a setting, or
    several parts joined by ``+`` that a cell must have together; a cell with one of ``unless_engine_variants`` is not
    covered.
    ``releases`` is a version specifier (PEP 440) of the bad releases. The cell has to end with ``verdict``, and one of
    ``signatures`` has to occur in its cause, where NUMBER matches any number. If ``details`` is not empty, one of its
    texts also has to occur in the ranks' tracebacks and output; use it if the cause says little. A cell that fails in
    another way is not excused.

    ``documented`` is the address of documentation that states the difference, and ``remedy`` are the engine options
    that this documentation recommends. With both, the cell is run again with the remedy, and its verdict is
    ``contract`` if it passes. ``user_models`` says that the failure also occurs on all models of users, regardless of
    ``models`` and ``variants``. With the ``isolation`` POOLED, the entry applies only to failures on ranks that earlier
    cells had used, and not to failures on fresh ranks. ``location`` is the file and line of the entry.
    """

    engine: str
    check: str
    upstream: str
    reason: str
    verdict: str
    signatures: tuple[str, ...]
    releases: str = ""
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = ()
    meshes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    engine_variants: tuple[str, ...] = ()
    unless_engine_variants: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    documented: str = ""
    remedy: Mapping[str, Any] = field(default_factory=dict)
    user_models: bool = False
    isolation: str = ""
    data_coordinates: str = ""
    further_laws: tuple[str, ...] = ()
    location: str = ""

    @property
    def laws(self) -> tuple[str, ...]:
        """The patterns of all laws that this entry covers."""
        return (self.check, *self.further_laws)

    def covers_cell(self, cell: Cell, version: str) -> bool:
        """Return whether this entry covers ``cell`` on release ``version`` of the engine."""
        if not any(matches_pattern(cell.law, pattern) for pattern in self.laws):
            return False
        is_any_model = self.user_models and is_user_model(cell.model)
        narrowed = (
            (self.stages, cell.stage),
            (self.world_sizes, cell.world_size),
            (self.dtypes, cell.storage_dtype),
            (() if is_any_model else self.models, cell.model),
            (() if is_any_model else self.variants, split_variant(cell.variant)[0]),
        )
        return (
            split_release(cell.engine)[0] == self.engine
            and all(not allowed or value in allowed for allowed, value in narrowed)
            and any(map(cell.mesh.has_axes, self.meshes or (DEFAULT_MESH.label,)))
            and self.data_coordinates in ("", count_data_coordinates(cell))
            and (not self.engine_variants or _names_variant(self.engine_variants, cell.engine_variant))
            and not _names_variant(self.unless_engine_variants, cell.engine_variant)
            and self.applies_to_version(version)
        )

    @property
    def describes_a_way_to_fail(self) -> bool:
        """Whether the entry is for several laws under options or on old releases, so that some cells may pass."""
        return bool(self.further_laws or "*" in self.check) and (bool(self.engine_variants) or self.ends)

    @property
    def ends(self) -> bool:
        """Whether ``releases`` has a last release."""
        return self.upper_bound is not None

    @property
    def upper_bound(self) -> Version | None:
        """The smallest release of ``releases`` with the operator ``<``, ``<=`` or ``==``; None if there is none."""
        return min(list_bounds(self.releases, ("<", "<=", "==")), default=None)

    def is_stale_on(self, cell: Cell) -> bool:
        """Return whether a pass of ``cell``, which this entry covers, shows that the entry is stale.

        This is the case if the cell has the whole engine variant that the entry names, if the entry names no variant
        and the cell has default options, or if the cell runs a configuration file. Under other options, accumulation
        windows or calls of backward, a cell may pass although the entry is right about other cells.
        A pass never shows that an entry is stale if the entry ``describes_a_way_to_fail``; only a whole run shows it.
        Neither does a pass on a user's model that the entry does not name, nor on a single rank, which reduces and
        gathers nothing, unless the entry names the world size 1.
        """
        if self.describes_a_way_to_fail or (cell.world_size == 1 and 1 not in self.world_sizes):
            return False
        if is_user_model(cell.model) and cell.model not in self.models:
            return False
        is_named = cell.engine_variant in (self.engine_variants or ("",))
        return is_named or is_config_file(cell.engine_variant)

    def names_cause(self, cause: str) -> bool:
        """Return whether one of the signatures occurs in ``cause``."""
        return any(has_signature(cause, signature) for signature in self.signatures)

    def matches_failure(self, cause: str, details: str) -> bool:
        """Return whether a cell with this cause and these details failed in the expected way."""
        return self.names_cause(cause) and (not self.details or any(text in details for text in self.details))

    def describes_failure(self, verdict: str, cause: str, details: str) -> bool:
        """Return whether a cell with this verdict, this cause and these details failed in the expected way."""
        return verdict == self.verdict and self.matches_failure(cause, details)

    def names_cause_in(self, cell: Cell, version: str) -> bool:
        """Return whether ``cell`` sets the options that this entry names or, if it names none, has one of its laws."""
        return (
            split_release(cell.engine)[0] == self.engine
            and self.applies_to_version(version)
            and (
                _names_variant(self.engine_variants, cell.engine_variant)
                if self.engine_variants
                else any(matches_pattern(cell.law, pattern) for pattern in self.laws)
            )
        )

    def subsumes(self, other: ExpectedFailure) -> bool:
        """Return whether this entry describes each failure that ``other`` describes."""
        return (
            self.verdict == other.verdict
            and _every_text_has_a_part(other.signatures, self.signatures)
            and (not self.details or (bool(other.details) and _every_text_has_a_part(other.details, self.details)))
        )

    def applies_to_version(self, version: str) -> bool:
        """Return whether ``version`` is among the releases of this entry; True if the entry has no ``releases``.

        Otherwise returns False for a text that is not a version.
        """
        try:
            return not self.releases or SpecifierSet(self.releases).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


def count_data_coordinates(cell: Cell) -> str:
    """Return whether the ranks of a cell have ONE micro-batch or SEVERAL."""
    return ONE if cell.mesh.data_size(cell.world_size) == 1 else SEVERAL


def list_bounds(releases: str, operators: Sequence[str]) -> list[Version]:
    """Return the releases that a specifier names with one of ``operators``."""
    return [Version(part.version.removesuffix(".*")) for part in SpecifierSet(releases) if part.operator in operators]


def _every_text_has_a_part(texts: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether one of ``parts`` occurs in each of ``texts``."""
    return all(any(part in text or has_signature(text, part) for part in parts) for text in texts)


def has_signature(cause: str, signature: str) -> bool:
    """Return whether a signature occurs in a cause; NUMBER in the signature matches any number in the cause."""
    return signature in cause if NUMBER not in signature else compile_signature(signature).search(cause) is not None


def leaves_a_value_open(signature: str) -> bool:
    """Return whether a signature has NUMBER for a value or a factor, so that it matches every wrong number there."""
    return _OPEN_VALUE.search(signature) is not None


@cache
def compile_signature(signature: str) -> re.Pattern[str]:
    """Return the pattern of a signature."""
    return re.compile(_NUMBER.join(map(re.escape, signature.split(NUMBER))))


def _names_variant(names: Sequence[str], engine_variant: str) -> bool:
    """Return whether a cell with ``engine_variant`` has all parts of a setting in ``names``."""
    parts = frozenset(engine_variant.split(SEPARATOR))
    return any(parts.issuperset(name.split(SEPARATOR)) for name in names)


def parse_expected_failures(text: str, source: str, engine: str = "") -> tuple[ExpectedFailure, ...]:
    """Parse the tables ``[[expected_failure]]`` of one file. Raises UsageError with file and line.

    ``[[excuse]]`` is an older name of the tables. A file may mix both; its entries stay in the order of the file.
    Keys ``engine`` and ``releases`` above the tables apply to tables that do not set them; without the key ``engine``,
    the parameter ``engine`` applies. A table whose ``engine`` is a list becomes one entry for each engine; one whose
    ``law`` is a list stays one entry for all of these laws.
    """
    content = drop_option_tables(parse_toml(text, source), source)
    unknown = sorted(set(content) - {*DEFAULT_KEYS, AROUND, *TABLES})
    if unknown:
        allowed = (*DEFAULT_KEYS, AROUND, "[[expected_failure]]")
        raise UsageError.unknown_name(f"key in {source}", unknown[0], allowed)
    defaults = {"engine": engine, **{key: content[key] for key in DEFAULT_KEYS if key in content}}
    tables = {name: content.get(name, []) for name in TABLES}
    return tuple(
        parse_entry(expanded, location)
        for entry, location in locate_entries(tables, text, source)
        for expanded in expand_engines({**defaults, **entry})
    )


def locate_entries(
    tables: Mapping[str, Sequence[Mapping[str, Any]]], text: str, source: str
) -> list[tuple[Mapping[str, Any], str]]:
    """Return the entries of ``tables`` in the order of the file, each with its file and line.

    If the headers in ``text`` do not show the lines of all entries, as for inline tables, each location is only the
    file.
    """
    headers = [(number, _HEADER.fullmatch(line)) for number, line in enumerate(text.splitlines(), start=1)]
    names = [(match[1], f"{source}:{number}") for number, match in headers if match]
    if Counter(name for name, _ in names) != Counter({name: len(entries) for name, entries in tables.items()}):
        return [(entry, source) for entries in tables.values() for entry in entries]
    remaining = {name: iter(entries) for name, entries in tables.items()}
    return [(next(remaining[name]), location) for name, location in names]


def expand_engines(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a copy of ``entry`` for each engine of its list; return it unchanged if it names a single engine."""
    names = entry.get("engine")
    return [{**entry, "engine": engine} for engine in names] if isinstance(names, list) and names else [entry]


def parse_entry(entry: Mapping[str, Any], location: str) -> ExpectedFailure:
    """Parse one table. Raises UsageError for an unknown, missing or mistyped key, and for a pattern of no law."""
    allowed = {*STRING_KEYS, *LIST_KEYS, *FLAG_KEYS, "remedy"}
    for key, value in entry.items():
        if key not in allowed:
            raise UsageError.unknown_name(f"key of the expected failure at {location}:", key, sorted(allowed))
        if key in LIST_KEYS and not (
            isinstance(value, list) and all(isinstance(item, LIST_KEYS[key]) for item in value)
        ):
            raise UsageError(f"{location}: got {key} = {value!r}; expected a list of {LIST_KEYS[key].__name__}")
        if key in FLAG_KEYS and not isinstance(value, bool):
            raise UsageError(f"{location}: got {key} = {value!r}; expected true or false")
        if key in STRING_KEYS and not isinstance(value, str) and not (key == "law" and is_list_of_text(value)):
            raise UsageError(f"{location}: got {key} = {value!r}; expected a string")
    spellings = [key for key in ("law", "check") if key in entry]
    if len(spellings) != 1:
        got = "both 'law' and 'check'" if spellings else "neither 'law' nor 'check'"
        raise UsageError(f"{location}: the expected failure has {got}; give one key, 'law' or its older name 'check'")
    required = ("engine", *spellings, *REQUIRED_KEYS)
    for key in required:
        if not entry.get(key):
            raise UsageError(f"{location}: the expected failure lacks {key!r}; it needs {', '.join(required)}")
    if entry["verdict"] not in VERDICTS:
        raise UsageError.unknown_name(f"verdict of the expected failure at {location}:", entry["verdict"], VERDICTS)
    if entry.get("isolation", POOLED) != POOLED:
        raise UsageError.unknown_name(f"isolation of the expected failure at {location}:", entry["isolation"], [POOLED])
    if (coordinates := entry.get("data_coordinates", ONE)) not in (ONE, SEVERAL):
        what = f"number of data_coordinates of the expected failure at {location}:"
        raise UsageError.unknown_name(what, coordinates, [ONE, SEVERAL])
    if not isinstance(entry.get("remedy", {}), Mapping):
        raise UsageError(f"{location}: got remedy = {entry['remedy']!r}; expected a table of engine options")
    for mesh in entry.get("meshes", ()):
        require_label(mesh, location)
    law = entry[spellings[0]]
    laws = tuple(law) if isinstance(law, list) else (law,)
    try:
        SpecifierSet(entry.get("releases", ""))
        find_laws(laws)
    except (InvalidSpecifier, UsageError) as error:
        raise UsageError(f"{location}: {error}") from None
    fields: dict[str, Any] = {
        key: tuple(value) if key in LIST_KEYS else value for key, value in entry.items() if key not in spellings
    }
    return ExpectedFailure(**fields, check=laws[0], further_laws=laws[1:], location=location)


def require_label(mesh: str, location: str) -> None:
    """Raise UsageError for a mesh that is not spelled as in cell ids, because such a text matches no cell."""
    try:
        label = Mesh.label_axes(mesh)
    except UsageError as error:
        raise UsageError(f"{location}: {error}") from None
    if mesh != label:
        raise UsageError(f"{location}: got the mesh {mesh!r}; write {label!r}, as in a cell's id")


def is_list_of_text(value: object) -> bool:
    """Return whether ``value`` is a list of strings that is not empty."""
    return isinstance(value, list) and value != [] and all(isinstance(item, str) for item in value)
