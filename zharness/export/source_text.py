"""Edit the Python source text of a script: sort its imports and remove its unused definitions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


def split_imports(text: str) -> tuple[list[str], str]:
    """Return the imports at the top of ``text``, one statement for each name, and the rest of the text."""
    tree, found, last = ast.parse(text), [], 0
    for statement in tree.body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        last = statement.end_lineno or last
        found += [render_single_import(statement, alias) for alias in statement.names]
    return found, "\n".join(text.splitlines()[last:]).strip("\n")


def render_single_import(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the text of a statement that imports only the name of ``alias``."""
    tail = f" as {alias.asname}" if alias.asname else ""
    if isinstance(statement, ast.Import):
        return f"import {alias.name}{tail}"
    return f"from {statement.module} import {alias.name}{tail}"


def render_imports(statements: Iterable[str], used_names: frozenset[str]) -> str:
    """Return the text of those imports in ``statements`` that bind ``used_names``, in the order that isort chooses."""
    whole: set[str] = set()
    names: dict[str, set[str]] = {}
    for statement in statements:
        node = ast.parse(statement).body[0]
        assert isinstance(node, (ast.Import, ast.ImportFrom)), statement
        (alias,) = node.names
        bound = alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
        if bound not in used_names:
            continue
        if isinstance(node, ast.Import):
            whole.add(statement)
        else:
            names.setdefault(node.module or "", set()).add(statement.partition(" import ")[2])
    froms = {
        module: f"from {module} import {', '.join(sorted(found, key=isort_key))}" for module, found in names.items()
    }
    stdlib_lines = sorted((line for line in whole if is_stdlib(line.split()[1])), key=str.lower)
    stdlib_lines += [froms[module] for module in sorted(froms, key=str.lower) if is_stdlib(module)]
    other_lines = sorted((line for line in whole if not is_stdlib(line.split()[1])), key=str.lower)
    other_lines += [froms[module] for module in sorted(froms, key=str.lower) if not is_stdlib(module)]
    return "\n\n".join("\n".join(block) for block in (stdlib_lines, other_lines) if block)


def isort_key(name: str) -> tuple[int, str]:
    """Return the key by which isort orders imported names: constants first, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def is_stdlib(module: str) -> bool:
    """Return whether a module belongs to the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def collect_names(tree: ast.AST) -> frozenset[str]:
    """Return every identifier, attribute, keyword and identifier-like string in ``tree``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return frozenset(found)


def prune_unused(text: str) -> str:
    """Return ``text`` without unused functions, classes, methods and constants."""
    tree = ast.parse(text)
    units = [
        PrunableNode(holder, node, collect_names(node))
        for top in tree.body
        for holder, node in iter_prunable_nodes(top)
    ]
    while True:
        unused = set(find_unused(tree, units))
        if not unused:
            break
        units = [unit for unit in units if unit.node not in unused and unit.enclosing_class not in unused]
    kept = {unit.node for unit in units} | {unit.enclosing_class for unit in units}
    lines = text.splitlines()
    for node in reversed([piece for top in tree.body for piece in (top, *class_statements(top))]):
        if node not in kept:
            first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno).lineno
            lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or first) - first + 1)
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class PrunableNode:
    """A statement or a member of a class, which is kept or removed as a whole, with all names that it contains."""

    enclosing_class: ast.ClassDef | None
    node: ast.AST
    names: frozenset[str]


def iter_prunable_nodes(statement: ast.stmt) -> Iterator[tuple[ast.ClassDef | None, ast.AST]]:
    """Yield the statement itself or, for a class, its members, base classes and decorators."""
    if isinstance(statement, ast.ClassDef):
        yield from ((statement, node) for node in (*statement.body, *statement.bases, *statement.decorator_list))
    else:
        yield None, statement


def class_statements(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a class body, or an empty list for any other statement."""
    return statement.body if isinstance(statement, ast.ClassDef) else []


def find_unused(tree: ast.Module, units: list[PrunableNode]) -> Iterator[ast.AST]:
    """Yield the definitions whose name occurs in no other node.

    The methods ``forward`` and ``backward``, and all names that start with two underscores, count as used.
    """
    users: dict[str, list[PrunableNode]] = {}
    for unit in units:
        for name in unit.names:
            users.setdefault(name, []).append(unit)
    for unit in units:
        defined = get_definition_name(unit.node)
        method = unit.enclosing_class is not None
        if defined is None or defined.startswith("__") or (method and not isinstance(unit.node, ast.FunctionDef)):
            continue
        called = method and defined in ("forward", "backward")
        if not called and all(user is unit for user in users.get(defined, [])):
            yield unit.node
    for holder in {unit.enclosing_class for unit in units if unit.enclosing_class is not None}:
        if all(user.enclosing_class is holder for user in users.get(holder.name, [])):
            yield holder


def get_definition_name(node: ast.AST) -> str | None:
    """Return the name that a node defines, or None if it defines no name or several names."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None
