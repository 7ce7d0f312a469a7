"""Which names a piece of a module takes from it, and which it gives to something within, by Python's own rules."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from functools import cache

# Statements of a class that read all that they read before they give anything a name.
_READS_BEFORE_BINDING = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Expr)


@cache
def find_free_names(text: str) -> frozenset[str]:
    """Names that ``text``, a statement or an expression, takes from the module it stands in."""
    found: set[str] = set()
    for table in iter_symbol_tables(text):
        if table.get_type() == "module":  # newer Pythons count a comprehension's names among those around it
            found |= referenced_names(table) - (
                assigned_names(table) & all_comprehension_targets(text)
            ) | find_outer_reads(ast.parse(text), frozenset())
        else:
            found |= {
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()
            }
    return frozenset(found | find_class_body_reads(text)[0])


def find_global_reads(text: str) -> frozenset[str]:
    """Return the names that any scope of ``text`` reads from its module; a local variable is not one of them."""
    found: set[str] = set()
    for table in iter_symbol_tables(text):
        if table.get_type() == "module":
            found |= referenced_names(table)
        else:
            found |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return frozenset(found)


def all_comprehension_targets(text: str) -> set[str]:
    """The names that comprehensions give to what they run over."""
    return {name for node in ast.walk(ast.parse(text)) for name in comprehension_targets(node)}


def comprehension_targets(node: ast.AST) -> set[str]:
    """The names that a comprehension gives to what it runs over; of any other node, none."""
    loops: list[ast.comprehension] = getattr(node, "generators", [])
    return {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}


def find_outer_reads(node: ast.AST, local_names: frozenset[str]) -> set[str]:
    """The names of comprehensions within ``node`` that it reads where they are not theirs; ``own`` are, here."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return set()  # scopes of their own
    inner = local_names | comprehension_targets(node)
    found = {node.id} - local_names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            first = child is node.generators[0]  # type: ignore[attr-defined]  # what it runs over is read around it
            found |= find_outer_reads(child.iter, local_names if first else inner)
            found |= {name for part in child.ifs for name in find_outer_reads(part, inner)}
        else:
            found |= find_outer_reads(child, inner)
    return found


@cache
def find_bound_names(text: str) -> frozenset[str]:
    """Names that ``text`` gives to something within it: in one scope or another, one may mean that.

    A class's names are seen by its own body alone: a method's is mistaken for nothing where that does not read it.
    """
    found: set[str] = set()
    for table in iter_symbol_tables(text):
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global()}
        if table.get_type() == "module":
            found |= assigned_names(table) & referenced_names(table) | all_comprehension_targets(text)
        elif table.get_type() != "class":
            found |= assigned_names(table)
    return frozenset(found | find_class_body_reads(text)[1])


@cache
def find_class_body_reads(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Of the classes' own names, those that their bodies read: before they have them, from the module; and after."""
    before: set[str] = set()
    after: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        early: set[str] = set()
        own: set[str] = set()
        unbound: set[str] = set()
        for statement in node.body:
            table = next(iter_symbol_tables(ast.unparse(statement)))
            early |= referenced_names(table) - own
            after |= referenced_names(table) & own
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                unbound |= assigned_names(table)  # such a name is given to nothing yet
                continue
            own |= assigned_names(table)
            if not isinstance(statement, _READS_BEFORE_BINDING):  # in which order is not looked into
                after |= referenced_names(table) & own
            if isinstance(statement, ast.For):
                early -= assigned_names(table)
        before |= early & (own | unbound)
    return frozenset(before), frozenset(after)


def referenced_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a scope reads, its inner ones aside."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}


def assigned_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a scope gives to something."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}


def iter_symbol_tables(text: str) -> Iterator[symtable.SymbolTable]:
    """The scope that a statement or an expression stands in, and then those within it."""
    tables = [symtable.symtable(text, "script", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        yield table
