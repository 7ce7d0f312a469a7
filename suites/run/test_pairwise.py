"""Sets of engine options that contain every pair of compatible engine variants."""

from __future__ import annotations

from zharness.engines import Capabilities
from zharness.engines.capabilities import EngineOption
from zharness.engines.options import merge_options
from zharness.law_kit.pairwise import build_pairwise_rows


def test_every_two_compatible_variants_are_combined_in_some_row() -> None:
    variants = {"a": {"s": {"x": 1}}, "b": {"s": {"x": 2}}, "c": {"s": {"y": 1}}, "d": {"t": 1}}
    rows = list(build_pairwise_rows(variants))
    for one, other in ("ac", "ad", "bc", "bd", "cd"):
        both = merge_options(variants[one], variants[other])
        assert any(merge_options(row, both) == row for row in rows), (one, other)
    assert not list(build_pairwise_rows({}))


def test_two_variants_that_exclude_each_other_are_in_no_row() -> None:
    capabilities = Capabilities(
        frozenset({0}), frozenset({"fp32"}), variants={"a": {"x": 1}, "b": EngineOption({"y": 1}, excludes={"a": "no"})}
    )
    rows = list(build_pairwise_rows(capabilities.neutral_options, capabilities.neutral_exclusions))
    assert sorted(map(str, rows)) == ["{'x': 1}", "{'y': 1}"]
