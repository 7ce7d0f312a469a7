"""Copies of sharded weights: which ranks share a copy, what is summed over copies, saves at every number of copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zharness
from zharness.errors import ConfigError
from zharness.reference.engine import Engine


def build(copies: int, ranks: int, seed: int = 0, stage: int = 3) -> Engine:
    """Return an engine with ``copies`` copies of the weights over ``ranks`` ranks."""
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "mics_shard_size": ranks // copies},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}},
    }
    engine, *_ = zharness.initialize(model=nn.Linear(3, 1, bias=False), config=config)
    return engine


@pytest.mark.world_size(4)
def test_neighbours_share_a_copy_and_gradients_are_means_over_all_ranks(rank: int, world_size: int) -> None:
    engine = build(2, world_size)
    assert engine.shards()["weight"] == ((0, 2), (2, 3), (0, 2), (2, 3))
    engine.backward(engine(rank * torch.tensor([[6.0, 0.0, 8.0]])).sum())
    assert engine.full_grads()["weight"].tolist() == [[9.0, 0.0, 12.0]]
    engine.step()
    assert engine.grad_norm() == 15.0
    engine.close()


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.world_size(4)
def test_copies_of_other_stages_have_one_gradient_and_step(rank: int, world_size: int, stage: int) -> None:
    engine = build(2, world_size, stage=stage)
    before = engine.full_params()["weight"].clone()
    engine.backward(engine(torch.full((1, 3), float(rank))).sum())
    assert engine.full_grads()["weight"].tolist() == [[1.5, 1.5, 1.5]]
    engine.step()
    assert not engine.full_params()["weight"].equal(before)
    engine.close()


@pytest.mark.world_size(4)
def test_a_checkpoint_of_two_copies_is_loaded_into_one(rank: int, world_size: int, shared_tmp_path: Path) -> None:
    saved = build(2, world_size)
    saved.backward(saved(torch.full((1, 3), 1.0 + rank)).sum())
    saved.step()
    saved.save_checkpoint(shared_tmp_path)
    loaded = build(1, world_size, seed=1)
    loaded.load_checkpoint(shared_tmp_path)
    assert loaded.full_params()["weight"].equal(saved.full_params()["weight"])
    momentum = "momentum_buffer"
    assert loaded.full_optimizer_state()["weight"][momentum].equal(saved.full_optimizer_state()["weight"][momentum])


@pytest.mark.world_size(2)
def test_copies_that_do_not_divide_the_ranks_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}
    with pytest.raises(ConfigError, match="mics_shard_size is 3, which does not divide 2 ranks"):
        zharness.initialize(model=nn.Linear(1, 1), config=config)
