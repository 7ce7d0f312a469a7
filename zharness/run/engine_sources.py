"""Find the source files of an engine, and the functions in them, without importing the engine."""

from __future__ import annotations

import ast
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zharness.engines.engine_info import EngineInfo
from zharness.errors import UsageError

MINIMUM_VERSION = (7, 6, 2)  # of coverage.py: the first whose JSON report has functions
MAX_CONDITION = 80  # characters of a condition in the name of a branch
BRANCH = " > "  # between a function and a condition on the way to a branch
MODULE_LEVEL = "<module>"  # the name of the lines of a file that are in no function


@dataclass(frozen=True)
class FunctionLines:
    """A function of a source file, or a branch inside a function, with its name and its lines.

    The lines of a function include its signature. ``first_body_line`` is the first line that runs when the function is
    called, and ``condition_lines`` are the lines of the condition of a branch. A nested function is not part of the
    outer function, and a branch is not part of the function or branch around it.
    """

    name: str
    first_line: int
    first_body_line: int
    last_line: int
    condition_lines: range = range(0)


def require_coverage(option: str) -> None:
    """Raise UsageError, which names the ``option``, unless coverage.py is installed and new enough."""
    try:
        import coverage
    except ImportError:
        raise UsageError(f"{option} needs coverage.py; pip install 'zharness[coverage]'") from None
    if coverage.version_info[:3] < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise UsageError(
            f"{option} needs coverage.py {wanted}, got {coverage.__version__}; pip install 'zharness[coverage]'"
        )


def list_source_modules(engine_info: EngineInfo) -> tuple[str, ...]:
    """Return the modules and packages of an engine; without a declaration, the top-level package of its factory."""
    return engine_info.sources or (engine_info.target.partition(":")[0].partition(".")[0],)


@cache
def find_source_files(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of the source files of ``modules``, and of all modules in those that are packages."""
    roots = find_source_roots(modules)
    files = (file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root]))
    return tuple(dict.fromkeys(str(file) for file in files if file.is_file()))


def find_source_roots(modules: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folder of each of ``modules`` that is a package, and the source file of each other module.

    Modules that the installed release lacks, and modules that are not written in Python, are left out. No module is
    imported, because some packages replace functions of torch on import, after which this process could not run plain
    PyTorch any more.
    """
    found: dict[Path, None] = {}
    for name in modules:
        package, *inner = name.split(".")
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        if spec.submodule_search_locations is None and spec.origin is not None and spec.origin.endswith(".py"):
            found[Path(spec.origin)] = None  # a module that is a single file, not a package
        for folder in spec.submodule_search_locations or ():
            path = Path(folder, *inner)
            root = path if path.is_dir() else path.with_suffix(".py")
            if root.exists():
                found[root] = None
    return tuple(found)


def list_functions(source: str) -> list[FunctionLines]:
    """Return the functions and branches of a file's ``source``, inner ones behind outer ones. Raises SyntaxError.

    A branch is a block that a call of the function may skip, such as the body of an ``if`` or of a loop. Its name has
    the name of the function and the conditions that lead to the branch: ``Engine.step > if self.clip > else``.
    """
    found: list[FunctionLines] = []

    def collect(node: ast.AST, prefix: str, function: str) -> None:
        """Add the functions below ``node``, whose names begin with ``prefix``, and the branches of ``function``."""
        for child in ast.iter_child_nodes(node):
            name, inner = prefix, function
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name, inner = f"{prefix}{child.name}.", ""
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                last, inner = child.end_lineno or child.lineno, name[:-1]
                found.append(FunctionLines(name[:-1], first, child.body[0].lineno, last))
            branches = dict(list_branches(child)) if inner else {}
            for label, body in branches.items():
                branch, first = f"{inner}{BRANCH}{label}", body[0].lineno
                found.append(
                    FunctionLines(branch, first, first, body[-1].end_lineno or first, list_condition_lines(child))
                )
                collect(ast.Module(body, []), name, branch)
            inside = {statement for body in branches.values() for statement in body}
            rest: list[Any] = [
                below
                for below in ast.iter_child_nodes(child)
                if isinstance(below, (ast.stmt, ast.ExceptHandler, ast.match_case)) and below not in inside
            ]
            collect(ast.Module(rest, []), name, inner)

    collect(ast.parse(source), "", "")
    return found


def list_branches(node: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the blocks that may not run although their statement runs, each with its condition."""
    label = ""
    if isinstance(node, (ast.If, ast.While)):
        label = f"{type(node).__name__.lower()} {shorten(node.test)}"
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        label = f"for {shorten(node.target)} in {shorten(node.iter)}"
    elif isinstance(node, ast.ExceptHandler):
        label = f"except {shorten(node.type)}" if node.type else "except"
    elif isinstance(node, ast.match_case):
        label = f"case {shorten(node.pattern)}"
    if isinstance(node, (ast.If, ast.While, ast.For, ast.AsyncFor, ast.ExceptHandler, ast.match_case)):
        yield label, node.body
    if isinstance(node, (ast.If, ast.While, ast.For, ast.AsyncFor)) and node.orelse:
        yield f"else of {label}", node.orelse


def list_condition_lines(node: Any) -> range:
    """Return the lines of a statement with branches up to its first branch."""
    first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
    return range(first, max(first + 1, node.body[0].lineno))


def shorten(node: ast.AST) -> str:
    """Return the source of an expression or pattern, cut off after MAX_CONDITION characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= MAX_CONDITION else f"{text[:MAX_CONDITION]}..."


def list_code_lines(source: str) -> set[int]:
    """Return the lines of a file's ``source`` that have code, not only a comment.

    Raises SyntaxError or TokenError.
    """
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def name_lines(functions: list[FunctionLines], *, with_signatures: bool) -> dict[int, str]:
    """Return the name of the innermost function of each line that is in one.

    If ``with_signatures`` is true, the lines of a signature belong to its function, else to the code around it.
    """
    names = dict[int, str]()
    for function in functions:  # an inner function comes later, so that its name replaces that of the outer one
        first = function.first_line if with_signatures else function.first_body_line
        names.update(dict.fromkeys(range(first, function.last_line + 1), function.name))
    return names


def find_functions_of_lines(functions: list[FunctionLines], lines: set[int], *, with_signatures: bool) -> set[str]:
    """Return the name of the innermost function of each of ``lines``, or MODULE_LEVEL for a line outside of all.

    For ``with_signatures`` see ``name_lines``.
    """
    names = name_lines(functions, with_signatures=with_signatures)
    return {names.get(line, MODULE_LEVEL) for line in lines}
