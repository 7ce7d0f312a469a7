"""The house rules that a reader may rely on, checked on the source itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zharness"
PACKAGED = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for part in ("zharness", "suites", "repro", "scripts") for path in (ROOT / part).rglob("*.py"))

FLOORS = {
    "errors": 0,
    "cell": 0,
    "torch_private": 0,
    "comm": 0,
    "step_summary": 0,
    "world": 1,
    "workload": 1,
    "reference": 1,
    "engines": 2,
    "pytest_ranks": 3,
    "parity": 3,
    "law_kit": 4,
    "laws": 5,
    "mutants": 5,
    "run": 6,
    "report": 7,
    "releases": 7,
    "kill_matrix": 7,
    "doctor": 7,
    "export": 7,
    "plugin": 8,
    "cli": 8,
    "conformance": 8,
    "verification": 8,
    "compat": 8,
    "__main__": 9,
}
# zharness/__init__.py is the front door: it may hand out names of any floor, and nobody inside imports from it but its
# version and its place.
FRONT_DOOR = "__init__"
FOREIGN = {"deepspeed", "torch.distributed.fsdp", "torch.nn.parallel"}
LONGEST = 400
BANNED = {"allclose", "assert_close", "sleep", "approx"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file with its line, also inside functions; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(tree_of(path)):
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


def upward(path: Path) -> Iterator[str]:
    own = room_of(path)
    for line, room in rooms_imported(path) if own != FRONT_DOOR else ():
        if room not in (own, "errors") and FLOORS[room] >= FLOORS[own]:
            yield f"line {line} is on floor {FLOORS[own]} and imports zharness.{room} on {FLOORS[room]}"


def foreign(path: Path) -> Iterator[str]:
    at_the_top = {node.lineno for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))}
    for line, name in imports(path):
        if any(name == package or name.startswith(f"{package}.") for package in FOREIGN):
            if room_of(path) != "engines":
                yield f"line {line} imports {name}"
            elif line in at_the_top and not name.startswith("torch"):
                yield f"line {line} imports {name} at the top"


def long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > LONGEST:
        yield f"{lines} lines"


def typed(path: Path) -> Iterator[str]:
    # A reproduction is pasted into an issue, where only torch's own tolerance is understood.
    allowed = {"assert_close"} if path.parent.name == "repro" else set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            for keyword in {keyword.arg for keyword in node.keywords} & {"rtol", "atol"}:
                yield f"line {node.lineno} passes {keyword}"
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in BANNED - allowed:
                yield f"line {node.lineno} calls {name}"


def silent(path: Path) -> Iterator[str]:
    if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path)):
        yield "no docstring"


def wrong(rule: Callable[[Path], Iterator[str]], paths: Sequence[Path]) -> list[str]:
    """What ``rule`` says of ``paths``, each with its file."""
    return [f"{path.relative_to(ROOT)}: {words}" for path in paths for words in rule(path)]


def test_a_file_imports_only_lower_floors_or_its_own_package() -> None:
    assert not wrong(upward, PACKAGED)


def test_every_room_of_the_package_has_a_floor() -> None:
    assert {room_of(path) for path in PACKAGED} - {FRONT_DOOR} <= set(FLOORS)


def test_foreign_engines_are_imported_in_engines_alone_and_inside_functions() -> None:
    assert not wrong(foreign, PACKAGED)


def test_no_file_is_longer_than_a_sitting() -> None:
    assert not wrong(long, SOURCES)


def test_nobody_types_a_tolerance_or_sleeps() -> None:
    assert not wrong(typed, SOURCES)


def test_a_file_says_what_it_is_in_its_first_line() -> None:
    assert not wrong(silent, SOURCES)


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        (upward, "import zharness.run\n", "imports zharness.run on 6"),
        (foreign, "import deepspeed\n", "imports deepspeed"),
        (long, "\n" * (LONGEST + 1), f"{LONGEST + 1} lines"),
        (typed, "check(1, rtol=2)\n", "passes rtol"),
        (typed, "time.sleep(1)\n", "calls sleep"),
        (silent, "x = 1\n", "no docstring"),
    ],
)
def test_a_file_that_breaks_a_rule_is_told(
    rule: Callable[[Path], Iterator[str]], text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "laws" / "new.py"
    file.parent.mkdir()
    file.write_text(text)
    (told,) = wrong(rule, [file])
    assert words in told
