"""The plan that a model of transformers ships splits it over tp; a model without one is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zharness.engines.tensor_parallel import require_split_weights
from zharness.errors import EngineContractError, UsageError
from zharness.workload.shipped_plans import describe_unsplit_parts, read_shipped_plan
from zharness.workload.synchronized_norm import replace_synchronized_norms


class ModelWithPlan(nn.Module):
    """A model that ships a plan with a pattern, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 4, bias=False)
        self.tp_plan = {"layers.*": "colwise", "head": "colwise_gather_output"}


def test_a_pattern_of_a_plan_names_every_layer_that_it_matches() -> None:
    plan = read_shipped_plan("mine:model", ModelWithPlan(), 2)
    assert plan == {"layers.0": "colwise", "layers.1": "colwise", "head": "colwise_gather_output"}


def test_parts_of_a_plan_that_stay_whole_are_named() -> None:
    class ModelOfExperts(ModelWithPlan):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.ones(2, 2))
            self.tp_plan |= {"experts": "packed_colwise", "tokens": "embedding_rowwise"}

    assert describe_unsplit_parts(ModelOfExperts()) == "tokens (embedding_rowwise), experts (packed_colwise)"
    assert set(read_shipped_plan("mine:model", ModelOfExperts(), 2)) == {"layers.0", "layers.1", "head"}


def test_a_layer_of_the_plan_that_stays_whole_is_refused() -> None:
    with pytest.raises(EngineContractError, match=r"split no weight of 'head'; the plan says colwise"):
        require_split_weights(ModelWithPlan(), {"tokens": "sequence_parallel", "head": "colwise"})


def test_a_model_without_a_plan_or_with_a_tied_head_is_refused() -> None:
    with pytest.raises(UsageError, match="mine:model ships no plan for the axis tp: its attribute tp_plan is missing"):
        read_shipped_plan("mine:model", nn.Linear(2, 2), 2)
    tied = ModelWithPlan()
    tied.head.weight = tied.tokens.weight
    with pytest.raises(UsageError, match="splits head, whose weight is tied to an embedding"):
        read_shipped_plan("mine:model", tied, 2)


def test_a_synchronized_norm_on_tp_is_refused() -> None:
    model = ModelWithPlan()
    model.norm = replace_synchronized_norms(nn.SyncBatchNorm(2))
    with pytest.raises(UsageError, match="SyncBatchNorm, which would count each row once for every rank along tp"):
        read_shipped_plan("mine:model", model, 2)
