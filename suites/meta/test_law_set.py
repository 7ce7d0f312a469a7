"""The record of the law set: it has every law variant once, and a pinned version leaves out what came later."""

from __future__ import annotations

from collections import Counter

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.law_set import (
    describe_difference,
    list_later_changes,
    name_law_variant,
    parse_versions,
    read_versions,
)
from zharness.laws import LAWS
from zharness.run import Request
from zharness.run.plan import plan_with_coverage

RECORD = """
[[version]]
name = "1.0"
added = { "training.grads" = [""], "state.resume" = ["sgd"] }

[[version]]
name = "1.1"
added = { "state.resume" = ["adamw"] }
stricter = { "training.grads" = "each gradient is compared twice" }

[[version]]
name = "1.2"
added = { "training.modes" = [""] }
"""


def claims_of_registry(engine: str, stage: int) -> engines.Capabilities:
    """Return the claims of a built-in engine, which the registry knows without building it."""
    claims = engines.capabilities(engine, stage)
    assert claims is not None, engine
    return claims


def test_the_record_has_every_law_variant_once() -> None:
    recorded = Counter(name for version in read_versions() for name in version.added)
    known = {name_law_variant(law.name, variant.name) for law in LAWS.values() for variant in law.variants}
    assert not known - set(recorded), "enter these law variants in zharness/law_set.toml, as its head says"
    assert not set(recorded) - known, "delete these law variants from zharness/law_set.toml: no law has them"
    assert not [name for name, count in recorded.items() if count > 1]


def test_stricter_law_variants_exist_and_have_a_reason() -> None:
    recorded = {name for version in read_versions() for name in version.added}
    for version in read_versions():
        assert set(version.stricter) <= recorded - set(version.added)
        assert all(version.stricter.values())


def test_the_difference_of_two_versions_says_what_is_new_and_what_is_stricter() -> None:
    versions = parse_versions(RECORD)
    assert describe_difference("1.0", "1.1", versions) == [
        "state.resume-adamw: new in 1.1",
        "training.grads: stricter since 1.1: each gradient is compared twice",
    ]
    assert describe_difference("1.1", "1.2", versions) == ["training.modes: new in 1.2"]
    assert not describe_difference("1.2", "1.2", versions)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("1.1", "1.0", "the older version of the law set first: 1.0 1.1"),
        ("0.9", "1.1", "unknown version"),
        ("1.1", "3", "unknown"),
    ],
)
def test_versions_that_cannot_be_compared_are_refused(old: str, new: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe_difference(old, new, parse_versions(RECORD))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pinned_run_leaves_out_what_is_newer_or_stricter(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr("zharness.law_set.read_versions", lambda: parse_versions(RECORD))
    patterns = ("training.grads", "state.resume", "training.modes")
    request = Request(patterns, stages=(0,), law_set="1.0", depth=depth)
    planned = plan_with_coverage(request, claims_of_registry)
    names = {name_law_variant(cell.cell.law, cell.cell.variant) for cell in planned.cells}
    assert "state.resume-sgd" in names
    assert not names & set(planned.left_out)
    assert planned.left_out == list_later_changes("1.0", parse_versions(RECORD))


def test_a_pin_that_leaves_every_law_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zharness.law_set.read_versions", lambda: parse_versions(RECORD))
    with pytest.raises(UsageError, match=r"the law set 1\.0 has none of the laws training\.modes"):
        plan_with_coverage(Request(("training.modes",), law_set="1.0"), claims_of_registry)


def test_a_pin_does_not_limit_a_cell_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zharness.law_set.read_versions", lambda: parse_versions(RECORD))
    cell = Cell("training.modes", "reference", 0, 2, "fp32", "stateful")
    planned = plan_with_coverage(Request((cell.id,), law_set="1.0"), claims_of_registry)
    assert [each.cell for each in planned.cells] == [cell]
