"""Find the names that source text binds or reads from its module, by Python's scoping rules."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from functools import cache

# Class-level statements that read all their names before they bind any.
_READS_BEFORE_BINDING = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Expr)


@cache
def find_free_names(text: str) -> frozenset[str]:
    """Return the names that ``text``, a statement or an expression, reads from its module's scope."""
    found: set[str] = set()
    for table in iter_symbol_tables(text):
        if table.get_type() == "module":  # since Python 3.12 comprehension variables belong to the surrounding scope
            found |= referenced_names(table) - (
                assigned_names(table) & all_comprehension_targets(text)
            ) | find_outer_reads(ast.parse(text), frozenset())
        else:
            found |= {
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()
            }
    return frozenset(found | find_class_body_reads(text)[0])


def find_global_reads(text: str) -> frozenset[str]:
    """Return the names that any scope in ``text`` reads from the module's scope; local variables are left out."""
    found: set[str] = set()
    for table in iter_symbol_tables(text):
        if table.get_type() == "module":
            found |= referenced_names(table)
        else:
            found |= {
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()
            }
    return frozenset(found)


def all_comprehension_targets(text: str) -> set[str]:
    """Return the loop variables of all comprehensions in ``text``."""
    return {name for node in ast.walk(ast.parse(text)) for name in comprehension_targets(node)}


def comprehension_targets(node: ast.AST) -> set[str]:
    """Return the loop variables of a comprehension, or an empty set for any other node."""
    loops: list[ast.comprehension] = getattr(node, "generators", [])
    return {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}


def find_outer_reads(node: ast.AST, local_names: frozenset[str]) -> set[str]:
    """Return the names that ``node`` reads, except the loop variables of comprehensions.

    ``local_names`` are the loop variables of the comprehensions that enclose ``node``. The bodies of functions and
    classes are skipped.
    """
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return set()  # they have their own scopes
    inner = local_names | comprehension_targets(node)
    found = {node.id} - local_names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            first = child is node.generators[0]  # type: ignore[attr-defined]  # evaluated in the surrounding scope
            found |= find_outer_reads(child.iter, local_names if first else inner)
            found |= {name for part in child.ifs for name in find_outer_reads(part, inner)}
        else:
            found |= find_outer_reads(child, inner)
    return found


@cache
def find_bound_names(text: str) -> frozenset[str]:
    """Return the names that ``text`` binds in any scope, so that a renamed definition must not have one of these names.

    A name in a class body is returned only if the body itself reads it, since methods cannot read it without ``self``.
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
    """Return the class-level names that class bodies read before they bind them, and those that they read afterwards.

    A read before the binding reads the module's name.
    """
    before: set[str] = set()
    after: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        early: set[str] = set()
        bound: set[str] = set()
        unbound: set[str] = set()
        for statement in node.body:
            table = next(iter_symbol_tables(ast.unparse(statement)))
            early |= referenced_names(table) - bound
            after |= referenced_names(table) & bound
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                unbound |= assigned_names(table)  # an annotation without a value binds nothing
                continue
            bound |= assigned_names(table)
            if not isinstance(statement, _READS_BEFORE_BINDING):  # their order of reads and bindings is not analysed
                after |= referenced_names(table) & bound
            if isinstance(statement, ast.For):
                early -= assigned_names(table)
        before |= early & (bound | unbound)
    return frozenset(before), frozenset(after)


def referenced_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a scope itself reads, without the names that only its inner scopes read."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}


def assigned_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a scope binds."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}


def iter_symbol_tables(text: str) -> Iterator[symtable.SymbolTable]:
    """Yield the symbol table of ``text`` and those of its inner scopes."""
    tables = [symtable.symtable(text, "script", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        yield table
