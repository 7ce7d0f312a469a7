"""A layout assigns each element to as many ranks as the engine claims, under options as well as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zharness import engines
from zharness.engines import Capabilities, EngineOption, Piece
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.setting import Setting
from zharness.laws.training.sgd_step import judge_layout_coverage
from zharness.parity import RankEvidence
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import Snapshot
from zharness.workload import model_spec

HALVES = (Piece(0, 0, 2), Piece(1, 2, 4))
TWICE = (*HALVES, *(replace(piece, rank=piece.rank + 2) for piece in HALVES))
UNEVEN = (*HALVES, Piece(2, 0, 2))
REPLICATED = Capabilities(
    frozenset({3}), variants={"replicated": EngineOption({"replicas": 2}), "overlap": {"overlap": True}}
)


def count_mismatches(layout: tuple[Piece, ...], *options: str) -> int:
    """Return the number of mismatches that the law finds in ``layout`` on four ranks under engine options."""
    masters = Snapshot("masters", 0, {"weight": torch.zeros(4)})
    evidence = RankEvidence((masters,), {"weight": layout})
    ctx = JudgeContext(
        Baseline(model_spec("mlp"), 0, 4), (evidence,) * 4, torch.float32, setting=Setting(options),
        replicas=REPLICATED.with_options(options).replicas,
    )  # fmt: skip
    return sum(comparison.mismatch is not None for comparison in judge_layout_coverage(ctx))


@pytest.mark.parametrize(
    ("layout", "options", "is_right"),
    [
        (HALVES, (), True),
        (HALVES, ("overlap",), True),
        (TWICE, ("replicated",), True),
        (TWICE, ("overlap", "replicated"), True),
        (TWICE, (), False),
        (TWICE, ("overlap",), False),
        (HALVES, ("replicated",), False),
        (UNEVEN, ("replicated",), False),
    ],
)
def test_each_element_is_owned_as_often_as_the_options_claim(
    layout: tuple[Piece, ...], options: tuple[str, ...], is_right: bool
) -> None:
    assert (count_mismatches(layout, *options) == 0) is is_right


def test_replicas_of_shards_are_claimed_by_the_options_of_torch_s_engines() -> None:
    for engine in ("fsdp1", "fsdp2"):
        claims = engines.capabilities(engine, 3)
        assert claims is not None
        replicas = {name: claims.with_options((name,)).replicas for name in claims.engine_options}
        assert {name for name, count in replicas.items() if count > 1} <= {"two_replicas", "all_reduce_last"}
        assert (replicas["one_replica"], replicas["two_replicas"]) == (1, 2)
