"""The names that source text reads from its module, and those that it binds, are the same on every Python."""

from __future__ import annotations

import pytest

from zharness.export.scopes import find_bound_names, find_free_names

# A text, what it takes from its module (builtins among it), and what it gives to something within.
TEXTS = [
    ("entry = [helper(), [helper for helper in range(3)]]", {"helper", "range"}, {"helper"}),
    ("entry = [helper for helper in helper]", {"helper"}, {"helper"}),
    ("entry = [helper for helper in range(3)]", {"range"}, {"helper"}),
    ("def entry(): return [helper for helper in range(3)], helper()", {"helper", "range"}, {"helper"}),
    ("entry = [[helper for helper in range(2)], [helper for _ in range(2)]]", {"helper", "range"}, {"helper", "_"}),
    ("entry = {k: v for k, v in helper.items() if k in other}", {"helper", "other"}, {"k", "v"}),
    ("entry = lambda helper: [helper for _ in helper]", set(), {"helper", "_"}),
    (
        "class Entry:\n    try:\n        other = helper\n    except ValueError as helper:\n        pass",
        {"helper", "ValueError"},
        {"helper"},
    ),
    ("class Entry:\n    if True:\n        helper = helper", {"helper"}, {"helper"}),
    ("class Entry:\n    helper: int\n    other = helper", {"helper", "int"}, set()),
    ("class Entry:\n    helper = 1\n    other = helper", set(), {"helper"}),
]


@pytest.mark.parametrize(("text", "reached", "bound"), TEXTS, ids=[text.replace("\n", ";") for text, _, _ in TEXTS])
def test_names_are_taken_and_given_by_python_s_own_rules(text: str, reached: set[str], bound: set[str]) -> None:
    assert find_free_names(text) == reached
    assert find_bound_names(text) - {".0"} == bound, "but for what a comprehension calls what it runs over"
