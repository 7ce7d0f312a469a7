"""The reference engine through the Engine protocol, compared with the plain optimizer and schedule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from zharness.engines import optimizers
from zharness.engines.protocol import (
    AccumulationOwner,
    Engine,
    EngineConfig,
    Feature,
    GroupSpec,
    OptimizerSpec,
    Reduction,
)
from zharness.engines.reference import capabilities_at, factory
from zharness.errors import UsageError

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SPEC = OptimizerSpec(
    "adamw", {"lr": 1e-2}, groups=(GroupSpec("*.bias", {"weight_decay": 0.0, "lr": 0.1}),), schedule=(0.5, 1.0, 0.25)
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(stage: int, owner: AccumulationOwner, reduction: Reduction) -> None:
    plain = net()
    config = EngineConfig(
        stage, accumulation_steps=2, accumulation_owner=owner, reduction=reduction, clip=0.1, optimizer=SPEC
    )
    engine = factory(copy.deepcopy(plain), config)
    assert isinstance(engine, Engine)
    leaves = dict(plain.named_parameters())
    theirs = optimizers.build(leaves, SPEC)
    schedule = optimizers.schedule(theirs, SPEC)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        for micro in range(2):
            loss = engine(torch.randn(4, 5)).pow(2).mean()
            engine.backward(loss if owner is AccumulationOwner.ENGINE else loss / 2)
            if micro == 0 and owner is AccumulationOwner.ENGINE:
                engine.step()
        grads = engine.full_grads()
        factor = None
        engine.step()
        factor = min(1.0, 0.1 / (engine.grad_norm() + 1e-6))
        for name, p in leaves.items():
            p.grad = grads[name] * factor
        theirs.step()
        schedule.step()
        assert all(torch.equal(value, leaves[name]) for name, value in engine.full_params().items())
        assert engine.observe().learning_rates == tuple(group["lr"] for group in theirs.param_groups)
    x = torch.randn(2, 5)
    assert torch.equal(functional_call(engine.module, engine.full_params(), x), plain(x))
    for name, pieces in engine.layout().items():
        assert [piece.stop for piece in pieces][-1] == leaves[name].numel()
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (stage == 0) == (engine.layout() == {})
    engine.close()


@pytest.mark.world_size(3)
@stages
@pytest.mark.parametrize("owner", AccumulationOwner)
@pytest.mark.parametrize("reduction", Reduction)
def test_groups_schedule_clipping_and_both_owners_of_accumulation(
    stage: int, owner: AccumulationOwner, reduction: Reduction
) -> None:
    train(stage, owner, reduction)


@pytest.mark.world_size(1)
def test_options_override_the_configuration_and_unclaimed_features_are_refused() -> None:
    config = EngineConfig(3, options={"zero_optimization": {"stage3_prefetch_bucket_size": 10}, "steps_per_print": 5})
    engine = factory(net(), config)
    with pytest.raises(UsageError, match="no room"), engine.no_sync():
        pass
    with pytest.raises(UsageError, match="bf16, fp16, fp32"):
        factory(net(), EngineConfig(dtype="fp8"))
    with pytest.raises(UsageError, match=r"zero_optimization\.nonsense"):
        factory(net(), EngineConfig(options={"zero_optimization": {"nonsense": 1}}))
    whole, shards = {Feature.REDUCED_WEIGHT_GRADIENTS}, {Feature.OWN_WEIGHT_GRADIENTS}
    wanted = [whole | {Feature.SHARD_ACCESS}, whole, {Feature.NO_SYNC} | whole, {Feature.NO_SYNC} | shards]
    assert [set(capabilities_at(stage).refuses) - {Feature.MUON} for stage in range(4)] == wanted
