"""Editing, copying and extending a model whose parameters are sharded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn

from zharness.errors import ConfigError, UsageError
from zharness.reference import Engine, initialize

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """A model with a tied weight, a recurrent layer and a parametrized one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.tied.weight = self.first.weight
        self.lstm = nn.LSTM(3, 5)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x) + self.tied(x))[0])


def pair(stage: int, net: type[nn.Module] = Net, **more: Mapping[str, Any] | str) -> tuple[Engine, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain = net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config)
    return engine, plain, torch.randn(2, 4)


@stages
@pytest.mark.world_size(1, 3)
def test_rank_0s_edit_inside_gathered_reaches_every_rank(stage: int) -> None:
    engine, plain, x = pair(stage)
    with engine.gathered(["first.weight", dict(engine.module.named_parameters())["first.bias"]]) as weights:
        assert list(weights) == ["first.weight", "first.bias"]
        weights["first.weight"].fill_(dist.get_rank() + 1)
        nn.init.constant_(engine.module.first.bias, 2.0)
        assert torch.equal(engine.module.tied.weight, weights["first.weight"])
    nn.init.constant_(plain.first.weight, 1.0)
    nn.init.constant_(plain.first.bias, 2.0)
    assert torch.equal(engine(x), plain(x))
    for net in (engine, plain):
        net(x).sum().backward()
    engine.step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    # All ranks have the same gradient, so the mean equals it, up to the last bit if N is not a power of two.
    if dist.get_world_size() == 1:
        assert all(torch.equal(p, plain.get_parameter(name)) for name, p in engine.full_params().items())
    assert engine.gathered_bytes() == 0


@stages
@pytest.mark.world_size(2)
def test_an_edit_reaches_the_masters_and_keeps_the_precision_of_unedited_elements(stage: int) -> None:
    engine, plain, _ = pair(stage, bf16={"enabled": True})
    before = engine.full_masters()
    with engine.gathered() as weights:
        weights["first.bias"][1] = 3.0
    for name, master in engine.full_masters().items():
        expected = plain.get_parameter(name).detach().clone()
        assert torch.equal(before[name], expected), name
        if name == "first.bias":
            expected[1] = 3.0
        assert torch.equal(master, expected), name
        assert torch.equal(engine.full_params()[name], expected.bfloat16()), name


def edit_and_raise_on_rank_1(engine: Engine) -> None:
    with engine.gathered() as weights:
        weights["first.weight"].fill_(7)
        if dist.get_rank() == 1:
            raise ZeroDivisionError("division by zero")


@stages
@pytest.mark.world_size(2)
def test_an_edit_is_dropped_on_all_ranks_if_one_raises(stage: int) -> None:
    engine, _, x = pair(stage)
    before = engine.full_params()
    with pytest.raises((ZeroDivisionError, UsageError), match=r"by zero|another rank raised"):
        edit_and_raise_on_rank_1(engine)
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())
    engine(x).sum().backward()
    engine.step()
    with pytest.raises(UsageError, match="unknown parameter 'nonsense'"), engine.gathered(["nonsense"]):
        pass


@pytest.mark.world_size(2)
def test_an_edit_that_would_be_lost_is_refused_at_the_next_read_and_at_the_step() -> None:
    engine, _, x = pair(3)
    engine(x).sum().backward()
    nn.init.ones_(engine.module.first.weight)
    with pytest.raises(UsageError, match=r"'first.weight' was edited in place.*engine\.gathered"):
        engine.step()
    with pytest.raises(UsageError, match=r"'first.weight' was edited in place"):
        engine(x)


@pytest.mark.world_size(2)
def test_training_inside_gathered_is_refused() -> None:
    engine, plain, x = pair(3)
    with engine.gathered():
        with torch.no_grad():
            assert torch.equal(engine(x), plain(x))
        with pytest.raises(UsageError, match="forward that needs gradients"):
            engine(x)
        with pytest.raises(UsageError, match=r"step\(\) was called inside gathered"):
            engine.step()
    engine(x).sum().backward()
    engine.step()


@stages
@pytest.mark.world_size(2)
def test_a_deep_copy_is_the_plain_model(stage: int) -> None:
    engine, plain, x = pair(stage)
    twin = copy.deepcopy(engine.module)
    assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
    assert twin.tied.weight is twin.first.weight
    for name, p in plain.named_parameters():
        assert torch.equal(twin.get_parameter(name), p), name
        assert type(twin.get_parameter(name)) is nn.Parameter
    assert torch.equal(twin(x), plain(x))
    twin(x).sum().backward()
    assert engine.full_grads() == {}, "the copy belongs to no engine"
    assert torch.equal(engine(x), plain(x))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for module in self.more:
            x = module(x)
        return x


@stages
@pytest.mark.world_size(2)
def test_a_submodule_attached_later_uses_the_models_parameters_and_keeps_its_own(stage: int) -> None:
    engine, plain, x = pair(stage, Late)
    for net in (plain, engine.module):
        torch.manual_seed(1)
        tied, new = nn.Linear(4, 4), nn.Linear(4, 4)
        tied.weight = dict(net.named_parameters())["first.weight"]
        net.more.append(nn.Sequential(tied, nn.ReLU()))
        net.late = new
        net.more.append(net.late)
    for net in (plain, engine):
        net(x).sum().backward()
    grads = engine.full_grads()
    assert set(grads) == {"first.weight", "first.bias"}
    assert all(torch.equal(g, plain.get_parameter(name).grad) for name, g in grads.items())
    assert torch.equal(engine.module.late.weight.grad, plain.late.weight.grad)
    engine.close()
    assert all(type(m).__module__.startswith(("torch.nn", __name__)) for m in engine.module.modules())


@pytest.mark.world_size(1)
def test_a_scripted_submodule_that_is_attached_later_is_refused() -> None:
    engine, *_ = pair(3, Late)
    with pytest.raises(ConfigError, match=r"torch\.jit"):
        engine.module.more.append(torch.jit.script(nn.Linear(2, 2)))
    assert len(engine.module.more) == 0
