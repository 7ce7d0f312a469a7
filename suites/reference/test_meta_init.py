"""Models built on the meta device get the values that a real device gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import nn

from zharness.errors import ConfigError
from zharness.reference import initialize
from zharness.reference.client import meta_init

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=True)
        self.head.weight = self.embed.weight


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(3))


def config(stage: int) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": optimizer}


@stages
@pytest.mark.world_size(1, 3)
def test_a_deferred_model_starts_with_the_values_of_rank_0s_eager_model(stage: int) -> None:
    torch.manual_seed(0)
    eager = Net()
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(dist.get_rank())
    engine, *_ = initialize(model=model, config=config(stage))
    assert engine.module.head._parameters["weight"] is engine.module.embed._parameters["weight"]
    full = engine.full_params()
    assert [(n, p.requires_grad) for n, p in eager.named_parameters()] == [
        (n, p.requires_grad) for n, p in engine.module.named_parameters()
    ]
    for name, p in eager.named_parameters():
        assert torch.equal(full[name], p), name
    for name, buffer in eager.named_buffers():
        assert torch.equal(engine.module.get_buffer(name), buffer), name


@stages
@pytest.mark.world_size(2)
def test_an_optimizer_over_deferred_parameters_trains_them(stage: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = initialize(model=model, config=config(stage), optimizer=optimizer)
    before = engine.full_params()
    engine(torch.ones(1, 3)).sum().backward()
    engine.step()
    assert all(torch.equal(p, before[name] - 1) for name, p in engine.full_params().items())


@pytest.mark.world_size(2)
def test_a_rank_holds_at_most_one_full_module_beside_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    allocated = []
    materialise = meta_init.DeferredModule.materialise

    def watched(self: meta_init.DeferredModule, device: torch.device) -> Any:
        fresh = materialise(self, device)
        allocated.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return fresh

    monkeypatch.setattr(meta_init.DeferredModule, "materialise", watched)
    initialize(model=model, config=config(3))
    assert allocated == [64, 96, 128, 160, 192]


@pytest.mark.world_size(2)
def test_a_module_without_reset_parameters_is_refused_before_anything_is_allocated() -> None:
    with torch.device("meta"):
        model = Stubborn()
    with pytest.raises(ConfigError, match=r"Stubborn has weight on the meta device and no reset_parameters"):
        initialize(model=model, config=config(3))
    assert all(p.is_meta for p in model.parameters())
