"""Ranks that read different optimizer state, shards or weights get a verdict that names the rank and the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from zharness.engines import Piece
from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import RecordedStep, compare_published_weights
from zharness.laws.access.read_out import judge_read_state
from zharness.laws.access.shards import judge_read_shard
from zharness.laws.access.write_in import judge_write_state
from zharness.laws.training.invariance import judge_ranks_agree
from zharness.parity import Comparison, RankEvidence
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import Snapshot
from zharness.workload import model_spec

Records = Mapping[tuple[str, int], Mapping[str, Tensor]]  # by label and step
WEIGHT, STATE = {"weight": torch.ones(2)}, {"weight/momentum_buffer": torch.zeros(2)}
SHARDS = {"weight": torch.ones(1)}


def make_context(ranks: list[Records], variant: str = "") -> JudgeContext:
    """Return a context with the records of each rank of the parameter ``weight``, which two ranks share."""
    halves = {"weight": (Piece(0, 0, 1), Piece(1, 1, 2))}
    evidence = (
        RankEvidence(tuple(Snapshot(*place, tensors) for place, tensors in records.items()), halves)
        for records in ranks
    )
    return JudgeContext(Baseline(model_spec("mlp"), 0, len(ranks)), tuple(evidence), torch.float32, variant)


def write_state_records(last_state: Mapping[str, Tensor]) -> Records:
    """Return what a rank records in access.write_state if no parameter has a gradient."""
    steps = {("weights", step): WEIGHT for step in (1, 2)} | {("written", 1): STATE, ("read", 1): STATE}
    return {**steps, ("grads", 0): {}, ("written", 2): last_state}


def read_state_records(last_state: Mapping[str, Tensor]) -> Records:
    """Return what a rank records in access.read_state if no parameter has a gradient."""
    steps = {("weights", step): WEIGHT for step in range(3)} | {("grads", step): {} for step in range(2)}
    return {**steps, ("read", 0): {}, ("read", 1): STATE, ("kept", 0): STATE, ("read", 2): last_state}


def ranks_agree_records(last_state: Mapping[str, Tensor]) -> Records:
    """Return what a rank records in the first step of training.ranks_agree."""
    kernels = {"own": torch.tensor(False)}
    return {("kernels", 0): kernels, ("buffers", 0): {}, ("params", 0): WEIGHT, ("state", 0): last_state}


@pytest.mark.parametrize(
    ("judge", "make_records", "variant"),
    [
        (judge_write_state, write_state_records, "momentum"),
        (judge_read_state, read_state_records, "momentum"),
        (judge_ranks_agree, ranks_agree_records, ""),
    ],
)
@pytest.mark.parametrize("lacking_rank", [0, 1])
def test_ranks_with_other_state_are_named_with_the_key(
    judge: Callable[[JudgeContext], Iterator[Comparison]],
    make_records: Callable[[Mapping[str, Tensor]], Records],
    variant: str,
    lacking_rank: int,
) -> None:
    ranks = [make_records({} if rank == lacking_rank else STATE) for rank in range(2)]
    key = r"\['weight/momentum_buffer'\]"
    names = f"missing {key}" if lacking_rank else f"unknown {key}"
    with pytest.raises(EngineContractError, match=f"of rank 1, compared with that of rank 0, .*{names}"):
        list(judge(make_context(ranks, variant)))


def test_a_shard_that_a_rank_cannot_read_is_named() -> None:
    ranks = [{("full", 0): WEIGHT, ("shards", 0): shards} for shards in (SHARDS, {})]
    with pytest.raises(EngineContractError, match=r"rank 1 reads as shards .*missing \['weight'\]"):
        list(judge_read_shard(make_context(ranks)))


def test_a_parameter_without_layout_is_owned_by_every_rank() -> None:
    ranks = [{("full", 0): {"bias": torch.ones(2)}, ("shards", 0): {"bias": torch.ones(2)}} for _ in range(2)]
    assert not any(comparison.mismatch for comparison in judge_read_shard(make_context(ranks)))


def test_a_weight_that_a_rank_does_not_publish_is_named() -> None:
    ranks = [{("masters", 1): WEIGHT, ("params", 1): params} for params in (WEIGHT, {})]
    with pytest.raises(EngineContractError, match=r"the weights of rank 1, .*missing \['weight'\]"):
        list(compare_published_weights(make_context(ranks), RecordedStep(1, "masters"), "params"))
