"""Stage 3 with real layers: rounding, autocast, recurrent and attention layers, and failures."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from suites.reference.helpers import Breaking
from suites.reference.stage3 import CONFIG, Layers, Mlp, Recurrent, assert_mean, pair
from zharness.errors import ConfigError, StaleGraphError
from zharness.reference import initialize

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")


def train_layers(autocast: bool) -> None:
    engine, plain = pair(Layers)
    tokens = torch.randint(0, 11, (3, 7))
    losses = []
    for model in (plain, engine):
        # With autocast's cache plain PyTorch sums a recurrent weight's gradient over time steps in bf16. An unsharded
        # weight is not a leaf, so it is cast at each use, as without the cache.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = model(tokens)["out"][0].float().pow(2).mean()
        losses.append(loss.detach())
        loss.backward()
    assert torch.equal(*losses)
    del loss
    assert engine.gathered_bytes() == 0
    assert_mean(engine.full_grads(), plain)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    engine.step()
    for name, p in engine.full_params().items():
        assert torch.equal(p, before[name]) == name.startswith("unused"), name


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_gradients_of_every_kind_of_layer_are_the_mean_over_ranks(autocast: bool) -> None:
    train_layers(autocast)


def weights_computed_before() -> None:
    """Build a layer with torch's older weight_norm, which keeps a weight with its graph from construction on."""
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        plain, ours = (nn.utils.weight_norm(nn.Linear(4, 3)) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    engine, *_ = initialize(model=ours, config=CONFIG)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        x = torch.randn(2, 4)
        for model in (plain, engine):
            model(x).sum().backward()
        assert_mean(engine.full_grads(), plain)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()


@pytest.mark.world_size(2)
def test_a_graph_that_is_older_than_the_engine_does_no_harm() -> None:
    weights_computed_before()


def sparse_gradients(stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(7, 3, sparse=True)
    engine, *_ = initialize(model=copy.deepcopy(plain), config={**CONFIG, "zero_optimization": {"stage": stage}})
    tokens = torch.tensor([[1, 2], [2, 5]])
    for model in (plain, engine):
        model(tokens).sum().backward()
        (2 * model(tokens)).sum().backward()
    assert torch.equal(engine.full_grads()["weight"], plain.weight.grad.to_dense())
    engine.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_gradients_are_reduced_densely(stage: int) -> None:
    sparse_gradients(stage)


def step_between_retained_backwards(in_transform: bool) -> None:
    engine, plain = pair(Mlp)
    x = torch.randn(3, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for call, step, error in ((plain, optimizer.step, RuntimeError), (engine, engine.step, StaleGraphError)):
        # Under a transform saved tensors cannot get hooks, so torch's own version check has to notice the step.
        out = torch.func.grad(lambda v, call=call: call(v).pow(2).sum())(x) if in_transform else call(x)
        out.sum().backward(retain_graph=True)
        step()
        with pytest.raises(RuntimeError if in_transform else error, match=r"changed since|modified by an inplace"):
            out.sum().backward()
    engine.zero_grad()
    weights = engine.full_params()
    plain.load_state_dict(weights)
    plain.zero_grad()
    plain(x).sum().backward()
    del out
    engine(x).sum().backward()
    assert_mean(engine.full_grads(), plain)
    assert engine.gathered_bytes() == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_transform", [False, True], ids=["hooked", "in_transform"])
def test_a_step_between_two_backwards_on_one_graph_is_refused_as_in_torch(in_transform: bool) -> None:
    step_between_retained_backwards(in_transform)


def failure_and_retry() -> None:
    engine, plain = pair(lambda: nn.Sequential(Recurrent(), Mlp(), Recurrent()))
    x = torch.randn(3, 8)
    hidden = engine.module[0](x)
    out = engine.module[2](engine.module[1](Breaking.apply(hidden)))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken on purpose"):
            engine.backward(out.sum(), retain_graph=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.randn(3, 5))
    del out, hidden
    engine.zero_grad()
    assert engine.full_grads() == {}
    for model in (plain, engine):
        model(x).sum().backward()
    assert_mean(engine.full_grads(), plain)
    assert engine.gathered_bytes() == 0


@pytest.mark.world_size(2)
def test_the_step_after_an_exception_in_forward_or_backward_is_right() -> None:
    failure_and_retry()


def names_and_classes() -> None:
    engine, plain = pair(Layers)
    assert list(engine.module.state_dict()) == list(plain.state_dict())
    assert isinstance(engine.module.out, nn.Linear)
    assert torch.equal(engine.module.conv.weight, plain.conv.weight)
    shard = dict(engine.module.named_parameters())["conv.weight"]
    assert shard.numel() == -(-plain.conv.weight.numel() // dist.get_world_size())
    engine.close()
    assert type(engine.module.conv) is nn.Conv1d
    assert type(engine.module) is Layers


@pytest.mark.world_size(3)
def test_names_and_classes_are_those_of_the_model_and_close_restores_the_classes() -> None:
    names_and_classes()


def script() -> None:
    with pytest.raises(ConfigError, match=r"torch\.jit"):
        initialize(model=nn.Sequential(torch.jit.script(nn.Linear(2, 2))), config=CONFIG)


@pytest.mark.world_size(1)
def test_a_scripted_module_is_refused_by_name() -> None:
    script()
