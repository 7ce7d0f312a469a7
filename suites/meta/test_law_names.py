"""A fact about one law is a field of the law: the code that plans, runs and reports laws names none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.meta.test_house import PACKAGE, parse_file
from zharness.laws import LAWS

ROOMS = ("run", "report", "kill_matrix", "export", "releases", "doctor", "cli")
# The literals that may name a law, by file and law, with the reason.
ALLOWED = {
    ("cli/cells.py", "training.grads"): "the example in an error message about a missing cell",
    ("cli/model.py", "model.configured"): "the help of the option --steps",
    ("cli/releases.py", "torch_func.grad"): "an example in the help of a command",
    ("cli/check.py", "training.grads"): "an example in the help of a command",
    ("run/model_limits.py", "parameters.used_on_some_ranks"): "the law to which a message about a user's model points",
}
GROUPS = sorted({name.partition(".")[0] for name in LAWS})
NAME = re.compile(rf"(?<![\w.])(?:{'|'.join(GROUPS)})\.\w*")
COMMAND_ROOM = "cli"  # its docstrings are the help that click prints


def find_docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes that are docstrings."""
    owners = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    firsts = [owner.body[0] for owner in owners if owner.body]
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def find_law_names(path: Path, with_docstrings: bool = False) -> Iterator[str]:
    """Yield each law, or start of a law's name such as ``precision.``, in the string literals of a file."""
    tree = parse_file(path)
    skipped = set() if with_docstrings else find_docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            for name in NAME.findall(node.value):
                is_start = node.value == name and any(law.startswith(name) for law in LAWS)
                if name in LAWS or is_start:
                    yield name


def test_no_file_that_runs_or_reports_laws_names_one() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
        for name in find_law_names(path, with_docstrings=room == COMMAND_ROOM)
    }
    assert not found - ALLOWED.keys(), "make the fact a field of Law or Variant (zharness/law_kit/law.py)"
    assert not ALLOWED.keys() - found, "these reasons are no longer needed"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('if law == "training.grads": pass', ["training.grads"]),
        ('law.startswith("precision.")', ["precision."]),
        ('law.startswith("precision.autocast")', ["precision.autocast"]),
        ('"""The law training.grads."""', []),
        ('error(f"see training.grads, {x}")', ["training.grads"]),
        ('x = "training.json"', []),
    ],
)
def test_a_literal_that_names_a_law_is_found(text: str, names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text(text)
    assert list(find_law_names(file)) == names
