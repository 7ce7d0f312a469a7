"""The house rules that a reader may rely on, checked on the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zharness"
SOURCES = sorted(path for part in ("zharness", "suites", "repro", "scripts") for path in (ROOT / part).rglob("*.py"))

FLOORS = {
    "errors": 0,
    "case": 0,
    "comm": 0,
    "world": 1,
    "workload": 1,
    "reference": 1,
    "engines": 2,
    "items": 3,
    "parity": 3,
    "checks": 4,
    "mutants": 4,
    "run": 5,
    "report": 6,
    "releases": 6,
    "kills": 6,
    "doctor": 6,
    "export": 6,
    "plugin": 7,
    "cli": 7,
    "conformance": 7,
    "verification": 7,
    "compat": 7,
    "__main__": 8,
}
# zharness/__init__.py is the front door: it may hand out names of any floor, and nobody inside imports from it but its
# version and its place.
FRONT_DOOR = "__init__"
FOREIGN = {"deepspeed", "torch.distributed.fsdp", "torch.nn.parallel"}
LONGEST = 400
BANNED = {"allclose", "assert_close", "sleep", "approx"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file with its line, also inside functions; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def rooms_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] == "zharness" and len(parts) > 1 and parts[1] in FLOORS:
            yield line, parts[1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_lower_floors_or_its_own_package(path: Path) -> None:
    own = room_of(path)
    if own == FRONT_DOOR:
        return
    for line, room in rooms_imported(path):
        assert room in (own, "errors") or FLOORS[room] < FLOORS[own], (
            f"{path.relative_to(ROOT)}:{line} is on floor {FLOORS[own]} and imports zharness.{room} on {FLOORS[room]}"
        )


def test_every_room_of_the_package_has_a_floor() -> None:
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {FRONT_DOOR}
    assert rooms <= set(FLOORS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_foreign_engines_are_imported_in_engines_alone_and_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_the_top = {node.lineno for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))}
    for line, name in imports(path):
        if any(name == foreign or name.startswith(f"{foreign}.") for foreign in FOREIGN):
            assert room_of(path) == "engines", f"{path}:{line} imports {name}"
            assert line not in at_the_top or name.startswith("torch"), f"{path}:{line} imports {name} at the top"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_a_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_types_a_tolerance_or_sleeps(path: Path) -> None:
    # A reproduction is pasted into an issue, where only torch's own tolerance is understood.
    allowed = {"assert_close"} if path.parent.name == "repro" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            typed = {keyword.arg for keyword in node.keywords} & {"rtol", "atol"}
            assert not typed, f"{path}:{node.lineno} passes {typed}"
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in BANNED - allowed, f"{path}:{node.lineno} calls {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_in_its_first_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
