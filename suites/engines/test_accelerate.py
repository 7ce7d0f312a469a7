"""accelerate over DDP: it is DDP over all ranks, windows are the engine's, and the process stays as it was."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import AccumulationOwner, EngineConfig
from zharness.engines.registry import info
from zharness.errors import EngineContractError

pytestmark = pytest.mark.skipif(info("accelerate_ddp").version() is None, reason="accelerate is not installed")
WINDOW_OF_TWO = EngineConfig(accumulation_steps=2, accumulation_owner=AccumulationOwner.ENGINE)


@pytest.mark.world_size(2)
def test_a_window_of_two_steps_once_with_the_mean_over_micro_batches_and_ranks(rank: int) -> None:
    from zharness.engines import accelerate_ddp

    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    engine = accelerate_ddp.factory(model, WINDOW_OF_TWO)
    for micro in range(2):
        engine.backward(engine(torch.full((1, 1), 1.0 + 4 * micro + 2 * rank)).sum())
        assert model.weight.equal(before)
        engine.step()
    assert (before - model.weight).item() == 4.0  # of the inputs 1 and 3, and 5 and 7
    engine.close()


@pytest.mark.world_size(2)
def test_building_an_engine_leaves_variables_and_threads_as_they_were() -> None:
    from zharness.engines import accelerate_ddp

    before = dict(os.environ), torch.get_num_threads()
    engine = accelerate_ddp.factory(nn.Linear(1, 1), EngineConfig())
    engine.close()
    assert (dict(os.environ), torch.get_num_threads()) == before


@pytest.mark.world_size(2)
def test_another_wrapper_than_ddp_over_all_ranks_is_refused() -> None:
    from accelerate import Accelerator

    from zharness.engines import accelerate_ddp

    with launch_variables():
        accelerator = Accelerator(cpu=True)
    module = nn.Linear(1, 1)
    accelerate_ddp.require_ddp(accelerator, DistributedDataParallel(module))
    with pytest.raises(EngineContractError, match=r"accelerate prepared a Linear for 2 processes; expected Distrib"):
        accelerate_ddp.require_ddp(accelerator, module)
