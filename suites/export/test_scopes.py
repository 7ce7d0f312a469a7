"""The names that source text reads from its module, and those that it binds, are the same on every Python."""

from __future__ import annotations

import pytest

from zharness.export.scopes import find_bound_names, find_free_names

# A text, what it takes from its module (builtins among it), and what it gives to something within.
TEXTS = [
    ("asked = [told(), [told for told in range(3)]]", {"told", "range"}, {"told"}),
    ("asked = [told for told in told]", {"told"}, {"told"}),
    ("asked = [told for told in range(3)]", {"range"}, {"told"}),
    ("def asked(): return [told for told in range(3)], told()", {"told", "range"}, {"told"}),
    ("asked = [[told for told in range(2)], [told for _ in range(2)]]", {"told", "range"}, {"told", "_"}),
    ("asked = {k: v for k, v in told.items() if k in other}", {"told", "other"}, {"k", "v"}),
    ("asked = lambda told: [told for _ in told]", set(), {"told", "_"}),
    (
        "class Asked:\n    try:\n        other = told\n    except ValueError as told:\n        pass",
        {"told", "ValueError"},
        {"told"},
    ),
    ("class Asked:\n    if True:\n        told = told", {"told"}, {"told"}),
    ("class Asked:\n    told: int\n    other = told", {"told", "int"}, set()),
    ("class Asked:\n    told = 1\n    other = told", set(), {"told"}),
]


@pytest.mark.parametrize(("text", "reached", "bound"), TEXTS, ids=[text.replace("\n", ";") for text, _, _ in TEXTS])
def test_names_are_taken_and_given_by_python_s_own_rules(text: str, reached: set[str], bound: set[str]) -> None:
    assert find_free_names(text) == reached
    assert find_bound_names(text) - {".0"} == bound, "but for what a comprehension calls what it runs over"
