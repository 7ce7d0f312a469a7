"""Check the source for the rules of the project: import order, file length, tolerances, docstrings."""

from __future__ import annotations

import ast
import subprocess
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
    "names": 0,
    "toml_text": 0,
    "torch_private": 0,
    "distributed_tensor": 0,
    "raising_frame": 0,
    "comm": 0,
    "device": 1,
    "environment": 0,
    "mesh": 0,
    "step_summary": 0,
    "law_set": 2,
    "project_file": 2,
    "cell": 2,
    "world": 2,
    "workload": 2,
    "reference": 2,
    "engines": 3,
    "pytest_ranks": 4,
    "parity": 4,
    "law_kit": 5,
    "laws": 6,
    "mutants": 6,
    "run": 7,
    "report": 8,
    "releases": 8,
    "kill_matrix": 8,
    "doctor": 8,
    "export": 8,
    "hunt": 9,
    "site": 9,
    "tour": 9,
    "plugin": 10,
    "cli": 10,
    "conformance": 10,
    "verification": 10,
    "compat": 10,
    "__main__": 11,
}
# zharness/__init__.py exports the public API, so it may import any floor. Files of the package import
# nothing from it but its version and its path.
FRONT_DOOR = "__init__"
FOREIGN = {"deepspeed", "torch.distributed.fsdp", "torch.nn.parallel"}
LONGEST = 400
LONGEST_ENGINE = 2500
BANNED = {"allclose", "assert_close", "sleep", "approx"}


def get_room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def forget_parsed_files() -> Iterator[None]:
    """Free a million nodes of syntax trees, which slow every later fork and garbage collection of this process."""
    yield
    parse_file.cache_clear()


def find_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every import of a file with its line, also in functions; ``from a import b`` yields ``a`` and ``a.b``."""
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def find_imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in find_imports(path):
        parts = name.split(".")
        if parts[0] == "zharness" and len(parts) > 1 and parts[1] in FLOORS:
            yield line, parts[1]


def find_upward_imports(path: Path) -> Iterator[str]:
    own = get_room(path)
    for line, room in find_imported_rooms(path) if own != FRONT_DOOR else ():
        if room not in (own, "errors") and FLOORS[room] >= FLOORS[own]:
            yield f"line {line} is on floor {FLOORS[own]} and imports zharness.{room} on {FLOORS[room]}"


def find_foreign_imports(path: Path) -> Iterator[str]:
    at_the_top = {node.lineno for node in parse_file(path).body if isinstance(node, (ast.Import, ast.ImportFrom))}
    for line, name in find_imports(path):
        if any(name == package or name.startswith(f"{package}.") for package in FOREIGN):
            if get_room(path) != "engines":
                yield f"line {line} imports {name}"
            elif line in at_the_top and not name.startswith("torch"):
                yield f"line {line} imports {name} at the top"


def find_long_file(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > LONGEST:
        yield f"{lines} lines"


def find_typed_tolerances(path: Path) -> Iterator[str]:
    # A reproduction is pasted into an upstream issue, where a reader knows torch.testing only.
    allowed = {"assert_close"} if path.parent.name == "repro" else set()
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Call):
            for keyword in {keyword.arg for keyword in node.keywords} & {"rtol", "atol"}:
                yield f"line {node.lineno} passes {keyword}"
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in BANNED - allowed:
                yield f"line {node.lineno} calls {name}"


def find_missing_docstring(path: Path) -> Iterator[str]:
    if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(parse_file(path)):
        yield "no docstring"


def find_violations(rule: Callable[[Path], Iterator[str]], paths: Sequence[Path]) -> list[str]:
    """Describe every violation of ``rule`` in ``paths``, with its file."""
    return [f"{path.relative_to(ROOT)}: {message}" for path in paths for message in rule(path)]


def test_a_file_imports_only_lower_floors_or_its_own_package() -> None:
    assert not find_violations(find_upward_imports, PACKAGED)


def test_every_package_has_a_floor() -> None:
    assert {get_room(path) for path in PACKAGED} - {FRONT_DOOR} <= set(FLOORS)


def test_engines_are_imported_in_adapters_only_and_lazily() -> None:
    assert not find_violations(find_foreign_imports, PACKAGED)


def test_no_file_is_longer_than_the_limit() -> None:
    assert not find_violations(find_long_file, SOURCES)


def test_the_reference_engine_is_short_enough_to_read_in_one_sitting() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (PACKAGE / "reference").glob("*.py"))
    assert lines <= LONGEST_ENGINE, "the files of zharness/reference/ itself; its sub-packages are beside the engine"


def test_one_file_of_the_reference_engine_knows_how_uneven_ranks_are_handled() -> None:
    importers = {
        path.name
        for path in (PACKAGE / "reference").glob("*.py")
        for _, name in find_imports(path)
        if name.startswith("zharness.reference.uneven_ranks")
    }
    assert importers == {"initialize.py"}, "other files use collectives.RankAgreement"


def test_no_code_types_a_tolerance_or_sleeps() -> None:
    assert not find_violations(find_typed_tolerances, SOURCES)


def test_every_file_has_a_docstring() -> None:
    assert not find_violations(find_missing_docstring, SOURCES)


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        (find_upward_imports, "import zharness.run\n", "imports zharness.run on 7"),
        (find_foreign_imports, "import deepspeed\n", "imports deepspeed"),
        (find_long_file, "\n" * (LONGEST + 1), f"{LONGEST + 1} lines"),
        (find_typed_tolerances, "check(1, rtol=2)\n", "passes rtol"),
        (find_typed_tolerances, "time.sleep(1)\n", "calls sleep"),
        (find_missing_docstring, "x = 1\n", "no docstring"),
    ],
)
def test_a_file_that_breaks_a_rule_is_reported(
    rule: Callable[[Path], Iterator[str]], text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "laws" / "new.py"
    file.parent.mkdir()
    file.write_text(text)
    (violation,) = find_violations(rule, [file])
    assert words in violation


def test_no_tracked_file_is_one_that_git_ignores() -> None:
    """A tracked file named .venv once made ``python -m venv .venv`` fail in every clone."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert listed.returncode != 0 or not listed.stdout.split()  # an unpacked archive has no repository


def test_no_stray_is_tracked() -> None:
    """A tracked file named like an environment or a cache breaks ``python -m venv .venv`` in a clone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    strays = {".venv", "venv", "env", ".tox", ".nox", "build", "dist", "__pycache__", ".pytest_cache", ".hypothesis"}
    tracked = listed.stdout.splitlines()
    assert not [path for path in tracked if strays & set(path.split("/")) or path.endswith((".pyc", ".partial"))]
