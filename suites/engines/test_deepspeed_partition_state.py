"""The DeepSpeed adapter drops no state of the optimizer that a rank lacks without saying so."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

from zharness.engines import deepspeed
from zharness.engines.deepspeed_partition_state import PartitionState, choose_readable_keys
from zharness.engines.protocol import EngineConfig
from zharness.errors import EngineContractError
from zharness.laws.training.muon import MUON
from zharness.parity.muon import MOMENTUM
from zharness.workload import model_spec
from zharness.world import run

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def test_a_state_is_read_that_has_the_size_of_the_partition_on_every_rank() -> None:
    first = PartitionState(0, 64, False, {MOMENTUM: 111, "exp_avg": 64})
    second = PartitionState(1, 64, False, {MOMENTUM: 64, "exp_avg": 64})
    assert choose_readable_keys([first, second]) == {"exp_avg"}
    assert choose_readable_keys([second]) == {MOMENTUM, "exp_avg"}


def test_a_state_that_one_rank_lacks_is_an_error() -> None:
    first = PartitionState(0, 64, False, {MOMENTUM: 64})
    words = r"the state momentum_buffer on ranks \[0\], and none on ranks \[1\]"
    with pytest.raises(EngineContractError, match=words):
        choose_readable_keys([first, PartitionState(1, 64, False, {})])


def test_a_rank_whose_partition_is_padding_needs_no_state() -> None:
    first = PartitionState(0, 64, False, {MOMENTUM: 64})
    assert choose_readable_keys([first, PartitionState(1, 64, True, {})]) == set()


def read_state_without_momentum_of_the_last_rank(stage: int) -> str:
    """Return the error that a rank gets for the state of a step whose momentum the last rank has lost."""
    torch.set_num_threads(1)
    spec, rank = model_spec("matrices"), dist.get_rank()
    engine = deepspeed.factory(spec.model(0), EngineConfig(stage=stage, optimizer=MUON))
    batch = spec.micro_batch(0, rank, 0)
    engine.backward(spec.loss(engine(batch.inputs), batch.target))
    engine.step()
    if rank == dist.get_world_size() - 1:
        for state in engine._reader.engine.optimizer.optimizer.state.values():
            state.pop(MOMENTUM, None)
    try:
        engine.full_optimizer_state()
    except EngineContractError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_momentum_that_one_rank_lost_is_an_error_on_every_rank(stage: int) -> None:
    for error in run(read_state_without_momentum_of_the_last_rank, stage, world_size=2, timeout=120):
        assert "the state momentum_buffer on ranks [0], and none on ranks [1]" in error
