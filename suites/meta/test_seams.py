"""Mutants reach behind public names of the engines through the seams alone, so that an engine can be rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zharness.mutants

FOLDER = Path(zharness.mutants.__file__).parent
OTHERS = [path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("seams")]


def private_accesses(tree: ast.Module) -> Iterator[str]:
    """Yield every access to an attribute whose name begins with one underscore, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield f"line {node.lineno}: .{node.attr}"


def inner_engines(tree: ast.Module) -> Iterator[str]:
    """Yield every access to the engine behind an adapter, or to an attribute of that engine, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "engine":
            yield f"line {node.lineno}: {ast.unparse(node)}"


def reference_imports(tree: ast.Module) -> Iterator[str]:
    """Yield every module of the reference engine that is imported, with the line."""
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
        yield from (f"line {node.lineno}: {name}" for name in names if f"{name}.".startswith("zharness.reference."))  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_a_mutant_reaches_behind_public_names_through_the_seams_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(private_accesses(tree)) == []
    assert list(inner_engines(tree)) == []
    assert list(reference_imports(tree)) == []


def test_an_access_past_the_seams_is_found() -> None:
    tree = ast.parse(
        "from zharness.reference.engine import Engine\nimport zharness.reference\nengine._optimizer.step()\n"
        "self.right.engine.schedule.step()\ncore = engine.engine\n"
    )
    assert list(private_accesses(tree)) == ["line 3: ._optimizer"]
    assert sorted(inner_engines(tree)) == ["line 4: self.right.engine", "line 5: engine.engine"]
    assert len(list(reference_imports(tree))) == 3
