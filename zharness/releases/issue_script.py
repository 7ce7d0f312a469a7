"""Strip from a reproduction the parts that only `zharness repro` reads: header, signature and marks of the verdict.

The stripped script prints the same result. An error that the script caught only to compare it with the signature is
raised, so that its traceback is printed. Each function edits the lines of whole statements, because the scripts in
``repro/`` are formatted: no two statements share a line.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from zharness.releases.repros import MARKER

SIGNATURE, SUCCESS = "SIGNATURE", "OK"  # the constants in which a script repeats its header
_SUCCESS_MARK = "repro: "
_RESULT = re.compile(rf'print\((f?)"{re.escape(MARKER)}(.*)\\n", end="", flush=True\)')
_ONE_VALUE = re.compile(r"\{(\w+)\}")

Edit = tuple[ast.stmt, list[str]]  # a statement, and the lines that replace it


def strip_script(source: str) -> str:
    """Return the script ``source`` without header, signature and marks.

    Raises SyntaxError if ``source`` is not Python.
    """
    steps = (drop_docstring, drop_signature_checks, drop_checks_before_assertions)
    for strip in (*steps, inline_constants, raise_caught_errors, unmark_results, drop_unread_constants):
        source = strip(source)
    return re.sub(r"\n{4,}", "\n\n\n", source).strip() + "\n"


def drop_docstring(source: str) -> str:
    """Remove the docstring of the script, which contains its header."""
    first = ast.parse(source).body[0]
    return apply_edits(source, [(first, [])]) if is_text(first) else source


def is_text(statement: ast.stmt) -> bool:
    """Return whether ``statement`` is a string, such as a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def drop_signature_checks(source: str) -> str:
    """Remove the check that ends a script if the signature is missing: an ``if`` that only raises, or an assertion."""
    tree = ast.parse(source)
    found: list[Edit] = []
    for block in iter_blocks(tree):
        is_result = any(_RESULT.fullmatch(ast.get_source_segment(source, each) or "") for each in block)
        for statement in block:
            if isinstance(statement, ast.Assert):
                is_check = SIGNATURE in list_names(statement.test)
            else:
                is_check = isinstance(statement, ast.If) and only_raises(statement) and is_result
            if is_check:
                found.append((statement, []))
    return apply_edits(source, found)


def only_raises(statement: ast.If) -> bool:
    """Return whether ``statement`` does nothing but raise if its condition holds."""
    return not statement.orelse and len(statement.body) == 1 and isinstance(statement.body[0], ast.Raise)


def drop_checks_before_assertions(source: str) -> str:
    """Remove the comparison of a result with the signature, if an assertion that prints the result comes next."""
    found: list[Edit] = []
    for block in iter_blocks(ast.parse(source)):
        for statement, following in pairwise(block):
            if (
                isinstance(statement, ast.If)
                and isinstance(following, ast.Assert)
                and isinstance(following.msg, ast.Name)
                and list_names(statement.test) >= {SIGNATURE, following.msg.id}
                and get_result_text(source, statement.body) == f"{{{following.msg.id}}}"
            ):
                found.append((statement, []))
    return apply_edits(source, found)


def raise_caught_errors(source: str) -> str:
    """Replace a ``try`` whose handler only prints the error as the result by its body."""
    found: list[Edit] = []
    for block in iter_blocks(ast.parse(source)):
        for statement in block:
            if isinstance(statement, ast.Try) and prints_only_error(source, statement):
                found.append((statement, dedent_body(source, statement)))
    return apply_edits(source, found)


def prints_only_error(source: str, statement: ast.Try) -> bool:
    """Return whether ``statement`` has one handler, which only prints the error and ends the script."""
    if len(statement.handlers) != 1 or statement.orelse or statement.finalbody:
        return False
    (handler,) = statement.handlers
    text = get_result_text(source, handler.body)
    return text == f"{{{handler.name}}}" or (isinstance(handler.type, ast.Name) and text.startswith(handler.type.id))


def get_result_text(source: str, body: Sequence[ast.stmt]) -> str:
    """Return the text, with its placeholders, that ``body`` prints as the result before it returns 1; otherwise ''."""
    if len(body) != 2 or not isinstance(body[1], ast.Return):
        return ""
    match = _RESULT.fullmatch(ast.get_source_segment(source, body[0]) or "")
    return match[2] if match else ""


def dedent_body(source: str, statement: ast.Try) -> list[str]:
    """Return the lines of the body of ``statement``, and the comments in it, at the level of ``statement`` itself."""
    last = statement.body[-1].end_lineno
    lines = source.splitlines()[statement.lineno : last]
    return textwrap.indent(textwrap.dedent("\n".join(lines)), " " * statement.col_offset).splitlines()


def inline_constants(source: str) -> str:
    """Replace the signature and the line of success by their texts, and remove their definitions."""
    values: dict[str, str] = {}
    found: list[Edit] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
            if name in (SIGNATURE, SUCCESS) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                values[name] = json.dumps(value.value.removeprefix(_SUCCESS_MARK), ensure_ascii=False)
                found.append((statement, []))
    source = apply_edits(source, found)
    for name, text in values.items():
        # Before Python 3.12 the parser gives wrong positions for nodes inside an f-string.
        source = source.replace(f"{{{name}}}", text[1:-1].replace("{", "{{").replace("}", "}}"))
    return replace_names(source, values)


def replace_names(source: str, values: Mapping[str, str]) -> str:
    """Return ``source`` with each name in ``values`` replaced by its text."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id in values]
    lines = [line.encode() for line in source.splitlines()]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + values[node.id].encode() + line[node.end_col_offset :]
    return b"\n".join(lines).decode() + "\n"


def unmark_results(source: str) -> str:
    """Print each result without the mark by which `zharness repro` finds it."""

    def unmark(match: re.Match[str]) -> str:
        """Return the call that prints only the result."""
        text = match[2]
        if value := _ONE_VALUE.fullmatch(text):
            return f"print({value[1]}, flush=True)"
        return f'print({"f" if "{" in text else ""}"{text}", flush=True)'

    return _RESULT.sub(unmark, source)


def drop_unread_constants(source: str) -> str:
    """Remove the definitions of constants that no line reads any more."""
    tree = ast.parse(source)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    unread = [node for node in assigned if list_names(node.targets[0]).isdisjoint(read)]
    return apply_edits(source, [(node, []) for node in unread])


def iter_blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield each list of statements below ``tree``."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def list_names(expression: ast.expr) -> set[str]:
    """Return the names that ``expression`` reads."""
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def apply_edits(source: str, edits: Sequence[Edit]) -> str:
    """Return ``source`` with the lines of each statement replaced; the statements do not contain each other."""
    lines = source.splitlines()
    for statement, replacement in sorted(edits, key=lambda edit: edit[0].lineno, reverse=True):
        lines[statement.lineno - 1 : statement.end_lineno] = replacement
    return "\n".join(lines) + "\n"
