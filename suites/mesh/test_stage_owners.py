"""A weight of a pipeline has the owners that the engine claims, on the stages of its modules, which are in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from zharness.cell import Cell
from zharness.engines import deepspeed_pp, torch_pp
from zharness.engines.protocol import Capabilities, Piece
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.rank_context import scalar
from zharness.law_kit.stage_owners import IN_MODULE, IN_ORDER, OTHER_CLAIMS, claims_shards, judge_owners_of_stages
from zharness.mesh import Mesh
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import RankEvidence, Snapshot
from zharness.run.configuration import register_config, unregister_config
from zharness.run.observe_and_judge import claims_with_setting
from zharness.workload import model_spec

RANKS = 4
FIRST, WEIGHT, BIAS = "blocks.0.linear.weight", "blocks.1.linear.weight", "blocks.1.linear.bias"
CHAIN = {
    FIRST: (0, 3),  # tied
    "blocks.0.linear.bias": (0,),
    WEIGHT: (1,),
    BIAS: (1, 2),  # tied
    "blocks.2.linear.weight": (2,),
    "blocks.3.linear.bias": (3,),
}
ENDS = {
    "ends.weight": (0, 3),
    "ends.bias": (0, 3),
    "blocks.0.linear.weight": (1,),
    "blocks.0.linear.bias": (1,),
    "blocks.1.linear.weight": (2,),
    "blocks.1.linear.bias": (2,),
}
OWNERS = {"tied_chain": CHAIN, "tied_ends": ENDS}
# Model, what other ranks than on all their stages own it, on pp4, and the hint of the first mismatch.
PLACES = [
    ("tied_chain", {}, ""),
    ("tied_chain", {FIRST: (0,), BIAS: (1,)}, ""),
    ("tied_chain", {FIRST: (3,), BIAS: (2,)}, ""),
    ("tied_chain", {FIRST: (1,)}, IN_MODULE),
    ("tied_chain", {FIRST: (0, 2)}, IN_MODULE),
    ("tied_chain", {BIAS: (3,)}, IN_MODULE),
    ("tied_chain", {WEIGHT: (2,), "blocks.2.linear.weight": (1,)}, IN_ORDER),
    ("tied_ends", {}, ""),
    ("tied_ends", {"ends.weight": (0,), "ends.bias": (0,)}, ""),
    ("tied_ends", {"ends.weight": (3,), "ends.bias": (3,)}, ""),
    ("tied_ends", {WEIGHT: (1,)}, IN_MODULE),
    ("tied_ends", {name: tuple(3 - rank for rank in ranks) for name, ranks in ENDS.items()}, IN_ORDER),
]
CLAIMS = {
    "whole": Capabilities(frozenset({0, 1}), sharded_dtypes=frozenset({"bf16"})),
    "sharded": Capabilities(frozenset({0, 1}), sharded_dtypes=frozenset({"fp32", "bf16"})),
}
# What the engine claims, its stage, what the two ranks of a stage have, and the end of the first mismatch's hint.
SHARES = [
    ("whole", 0, "whole", ""),
    ("whole", 0, "halves", OTHER_CLAIMS[0]),
    ("whole", 0, "one", OTHER_CLAIMS[0]),
    ("sharded", 0, "halves", ""),
    ("sharded", 0, "one", ""),  # of a weight with fewer rows than ranks
    ("sharded", 0, "whole", OTHER_CLAIMS[1]),
    ("whole", 1, "halves", ""),
    ("whole", 1, "whole", "2 along dp_shard instead of 1"),
]


def find_hint(
    mesh: str, model: str, layout: Mapping[str, tuple[Piece, ...]], claims: Capabilities, stage: int = 0
) -> str:
    """Return the hint of the first mismatch that the owners of a layout have, or '' if they are right."""
    spec, parsed = model_spec(model), Mesh.parse(mesh)
    snapshots = (
        Snapshot("stage", 0, {"stage": scalar(stage)}),
        Snapshot("weights", 0, {name: param.detach() for name, param in spec.model(0).named_parameters()}),
    )
    ctx = JudgeContext(
        Baseline(spec, 0, parsed.data_size(RANKS)),
        (RankEvidence(snapshots, layout),) * RANKS,
        torch.float32,
        claims=claims,
        mesh=parsed,
    )
    return next((each.mismatch.hint for each in judge_owners_of_stages(ctx) if each.mismatch is not None), "")


def measure(model: str) -> Mapping[str, int]:
    """Return the number of elements of each parameter of a model."""
    return {name: param.numel() for name, param in model_spec(model).model(0).named_parameters()}


@pytest.mark.parametrize(("model", "changed", "hint"), PLACES)
def test_a_tied_weight_is_listed_on_any_stages_of_its_modules_and_modules_are_in_order(
    model: str, changed: Mapping[str, tuple[int, ...]], hint: str
) -> None:
    owners = {**OWNERS[model], **changed}
    layout = {
        name: tuple(Piece(rank, 0, elements) for rank in owners[name]) for name, elements in measure(model).items()
    }
    assert find_hint("pp4", model, layout, CLAIMS["whole"]) == hint


@pytest.mark.parametrize(("claimed", "stage", "shares", "hint"), SHARES)
def test_the_ranks_of_a_stage_have_whole_weights_or_shards_as_the_engine_claims(
    claimed: str, stage: int, shares: str, hint: str
) -> None:
    def divide(name: str, elements: int) -> tuple[Piece, ...]:
        """Return what the two ranks of a weight's stage own of it."""
        first = 2 * (int(name.split(".")[1]) // 2)
        spans = {
            "whole": ((0, elements), (0, elements)),
            "halves": ((0, elements // 2), (elements // 2, elements)),
            "one": ((0, elements),),
        }[shares]
        return tuple(Piece(first + index, start, stop) for index, (start, stop) in enumerate(spans))

    layout = {name: divide(name, elements) for name, elements in measure("chain").items()}
    found = find_hint("pp2", "chain", layout, CLAIMS[claimed], stage)
    assert hint in found
    assert bool(found) == bool(hint)


def list_sharded(claims: Capabilities) -> list[torch.dtype]:
    """Return the dtypes in which the ranks of a stage have shards at stage 0."""
    ctx = JudgeContext(Baseline(model_spec("chain"), 0, 1), (), torch.float32, claims=claims)
    return [dtype for dtype in (torch.float32, torch.bfloat16) if claims_shards(replace(ctx, dtype=dtype))]


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({}, [torch.bfloat16]),
        ({"schedule": "1f1b"}, [torch.bfloat16]),
        ({"data_parallel": "fully_shard"}, [torch.float32, torch.bfloat16]),
        ({"data_parallel": "fully_shard", "schedule": "zbv"}, [torch.float32, torch.bfloat16]),
    ],
)
def test_a_configuration_file_claims_the_shards_of_the_option_that_has_its_values(
    options: Mapping[str, str], dtypes: list[torch.dtype]
) -> None:
    cell = Cell.parse("pipeline.replicas[torch_pp{shards.json}-zero0-w4.pp2-fp32-chain-gpipe]")
    register_config("shards.json", options)
    try:
        assert list_sharded(claims_with_setting(cell, torch_pp.CAPABILITIES)) == dtypes
    finally:
        unregister_config("shards.json")


def test_engines_claim_shards_by_their_options_and_dtypes() -> None:
    whole = torch_pp.CAPABILITIES
    assert list_sharded(whole) == list_sharded(deepspeed_pp.CAPABILITIES) == [torch.bfloat16]
    for option in ("fully_shard", "resharded"):
        assert list_sharded(whole.with_options((option,))) == [torch.float32, torch.bfloat16]
