"""Stages 0 to 3 compared with the plain model: gradients, updates, accumulation, and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zharness.errors import NonFiniteError
from zharness.parity.bounds import gamma
from zharness.reference import Engine, initialize

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Tied, frozen, unused, tiny, empty and transposed parameters; the sizes of few are divisible by 3.

    Each is read once, so that each backward reduces each of them once at stage 3 too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.a.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(7, 7)
        self.transposed = nn.Parameter((torch.randn(4, 7) / 3).t())
        self.tiny = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(self.a(x))) + self.tied.bias
        return (h @ self.transposed) * self.tiny + self.scalar + self.empty.sum()


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def pair(
    stage: int, optimizer: Any = ADAM, net: Callable[[], nn.Module] = Net, **config: Any
) -> tuple[Engine, nn.Module]:
    torch.manual_seed(0)
    plain = net()
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, **config}
    if isinstance(optimizer, dict):
        config, optimizer = {**config, "optimizer": optimizer}, None
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config, optimizer=optimizer)
    torch.manual_seed(1 + dist.get_rank())
    return engine, plain


def local_grads(plain: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    plain.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def assert_mean(got: dict[str, Tensor], terms: Iterable[dict[str, Tensor]], micro_batches: int = 1) -> None:
    """Assert that ``got`` is within gamma of the float64 mean of ``terms`` over ranks and micro-batches."""
    terms = list(terms)
    assert got.keys() == set().union(*terms)
    u = torch.finfo(torch.float32).eps / 2
    n = dist.get_world_size() * len(terms)
    gamma = (n + 1) * u / (1 - (n + 1) * u)
    for name, actual in got.items():
        mean = sum(t[name].double() for t in terms if name in t)
        size = sum(t[name].double().abs() for t in terms if name in t)
        for part in (mean, size):
            dist.all_reduce(part)
            part /= dist.get_world_size() * micro_batches
        assert ((actual - mean).abs() <= gamma * size).all(), f"{name}: off by {(actual - mean).abs().max()}"


def optimizers() -> dict[str, Any]:
    return {
        "AdamW": torch.optim.AdamW,
        "SGD": lambda p, **k: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    }


def train(stage: int, name: str) -> None:
    """Assert at each step that the gradients are the mean, and that the update is torch's for these gradients."""
    make = optimizers()[name]
    engine, plain = pair(stage, lambda leaves: make(list(leaves.values()), lr=1e-2))
    theirs = make(plain.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(3, 5)
        local = local_grads(plain, plain(x).pow(2).mean())
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        grads = engine.full_grads()
        assert_mean(grads, [local])
        for key, p in plain.named_parameters():
            p.grad = grads.get(key)
        theirs.step()
        engine.step()
        weights = engine.full_params()
        for key, p in plain.named_parameters():
            assert torch.equal(weights[key], p), key
        assert engine.full_grads() == {}
    state = engine.full_optimizer_state()
    for key, p in plain.named_parameters():
        wanted = {k: v for k, v in theirs.state[p].items() if v is not None}
        assert state.get(key, {}).keys() == wanted.keys(), key
        assert all(torch.equal(state[key][k], v) for k, v in wanted.items()), key


@stages
@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_is_the_plain_optimizers_step_with_the_mean_gradient(stage: int, name: str) -> None:
    train(stage, name)


def accumulate(stage: int, steps: int) -> None:
    engine, plain = pair(stage, {"type": "SGD", "params": {"lr": 1.0}}, gradient_accumulation_steps=steps)
    before = engine.full_params()
    for _ in range(2):  # the second accumulation window starts without gradients
        plain.load_state_dict(engine.full_params(), strict=False)
        terms = []
        for micro in range(steps):
            x = torch.randn(3, 5)
            for scale in (1.0, 0.5):  # several backwards belong to one micro-batch
                terms.append(local_grads(plain, plain(x).pow(2).mean() * scale))
                (engine(x).pow(2).mean() * scale).backward()
            if micro < steps - 1:
                engine.step()
                assert engine.steps == 0 or engine.steps == 1
        before = engine.full_params()
        grads = engine.full_grads()
        assert_mean(grads, terms, steps)
        assert_mean(engine.full_grads(), terms, steps)
        engine.step()
        after = engine.full_params()
        for name, p in before.items():
            assert torch.equal(after[name], p - grads.get(name, torch.zeros(()))), name
    assert engine.steps == 2


@pytest.mark.world_size(3)
@stages
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_micro_batches_and_several_backwards_accumulate_to_their_mean(stage: int, steps: int) -> None:
    accumulate(stage, steps)


def scale_and_backward(stage: int) -> None:
    """Call backward with the loss scale in one of the ways in deepspeedai/DeepSpeed#8045."""
    engine, plain = pair(stage)
    x = torch.randn(3, 5)
    second = local_grads(plain, plain(x).sum())
    for scaled in (engine.scale, lambda loss: engine.scale(loss, retain_graph=True), lambda loss: loss):
        out = engine(x)
        scaled(out.pow(2).sum()).backward(retain_graph=True)
        engine.zero_grad()
        scaled(out.sum()).backward(retain_graph=True)
        assert_mean(engine.full_grads(), [second])
        engine.zero_grad()


@pytest.mark.world_size(2)
@stages
def test_a_retained_graph_may_be_scaled_in_every_way(stage: int) -> None:
    scale_and_backward(stage)


def late_backward(stage: int) -> None:
    engine, plain = pair(stage)
    terms = []
    for _ in range(3):
        x = torch.randn(3, 5)
        terms.append(local_grads(plain, plain(x).sum()))
        engine(x).sum().backward()
        assert_mean(engine.full_grads(), terms)
    engine(x).sum().backward()
    engine.zero_grad()
    assert engine.full_grads() == {}
    assert all(p.grad is None for p in engine.module.parameters())
    x = torch.randn(3, 5, requires_grad=True)
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    (got,) = torch.autograd.grad(engine(x).sum(), x)
    assert torch.equal(got, wanted)
    assert engine.full_grads() == {}


@pytest.mark.world_size(2)
@stages
def test_full_grads_between_backwards_reduces_nothing_twice(stage: int) -> None:
    late_backward(stage)


def clip(stage: int, limit: float) -> None:
    engine, plain = pair(stage, {"type": "SGD", "params": {"lr": 1.0}}, gradient_clipping=limit)
    x = torch.randn(3, 5)
    engine.backward(engine(x).pow(2).sum())
    grads, before = engine.full_grads(), engine.full_params()
    for name, p in plain.named_parameters():
        p.grad = grads.get(name)
    exact = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt().item()
    assert engine.grad_norm() is None
    engine.step()
    bound = gamma(sum(g.numel() for g in grads.values()), torch.float64) * exact  # the squares are summed in float64
    assert abs(engine.grad_norm() - exact) <= bound
    factor = min(1.0, limit / (engine.grad_norm() + 1e-6))
    for name, p in engine.full_params().items():
        assert torch.equal(p, before[name] - grads[name] * factor if name in grads else before[name]), name


@pytest.mark.world_size(3)
@stages
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_gradients_are_clipped_by_their_global_norm(stage: int, limit: float) -> None:
    clip(stage, limit)


def infinite_norm(stage: int, value: float) -> None:
    engine, _ = pair(stage, gradient_clipping=1.0)
    before = engine.full_params()
    loss = (engine(torch.randn(3, 5)) * value).sum()
    engine.backward(loss if dist.get_rank() == 1 else loss.nan_to_num(0.0, 0.0, 0.0))
    with pytest.raises(NonFiniteError, match=r"not finite on some rank.*no weight was changed"):
        engine.step()
    norm = torch.tensor(engine.grad_norm())
    assert norm.isnan() if value != value else norm.isinf() or norm.isnan()
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())
    assert (engine.full_grads(), engine.steps, engine.skipped_steps) == ({}, 0, 1)


@pytest.mark.world_size(2)
@stages
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_or_norm_that_is_not_finite_on_one_rank_is_reported_and_raises_on_all(stage: int, value: float) -> None:
    infinite_norm(stage, value)


def unseen_loss(stage: int) -> None:
    engine, _ = pair(stage)
    before = engine.full_params()
    (engine(torch.randn(3, 5)) * (float("nan") if dist.get_rank() == 1 else 1.0)).sum().backward()
    with pytest.raises(NonFiniteError, match=r"not finite on some rank.*no weight was changed"):
        engine.step()
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())


@pytest.mark.world_size(2)
@stages
def test_a_gradient_of_a_loss_outside_the_engine_is_checked_too(stage: int) -> None:
    unseen_loss(stage)


def refuse_stale_graph(stage: int) -> None:
    engine, _ = pair(stage)
    out = engine(torch.randn(3, 5))
    out.sum().backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match=r"changed since|modified by an inplace"):
        out.pow(2).sum().backward()


@stages
@pytest.mark.world_size(1, 2, 3)
def test_every_rank_refuses_a_stale_graph(stage: int) -> None:
    refuse_stale_graph(stage)


def refuse_where_nothing_was_updated(stage: int) -> None:
    def build(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(leaves.values(), lr=1.0)

    engine, _ = pair(stage, build, lambda: nn.Linear(2, 1, bias=False))  # two elements: the third rank has none
    out = engine(torch.ones(1, 2, requires_grad=True))
    out.sum().backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match=r"changed since|modified by an inplace"):
        out.sum().backward()


@pytest.mark.world_size(3)
@stages
def test_a_rank_that_owns_no_element_refuses_a_stale_graph_too(stage: int) -> None:
    refuse_where_nothing_was_updated(stage)


def one_model_start() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.BatchNorm1d(4)
    nn.init.normal_(net.weight)
    net.running_mean.normal_()
    engine, *_ = initialize(
        model=net, config={"train_batch_size": dist.get_world_size(), "optimizer": {"type": "SGD", "params": {"lr": 1}}}
    )
    for value in (net.weight.detach().clone(), net.running_mean.clone()):
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value)
    assert engine.settings.stage == 0


@pytest.mark.world_size(2)
def test_every_rank_starts_from_rank_0s_parameters_and_buffers() -> None:
    one_model_start()


def allocated_bytes(stage: int) -> dict[str, int]:
    """Return the bytes that this rank holds after a backward and before its step."""
    engine, _ = pair(stage, net=lambda: nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60)))
    for _ in range(2):
        F.mse_loss(engine(torch.randn(3, 60)), torch.zeros(3, 60)).backward()
        held = engine.allocated_bytes()
        engine.step()
    return held | {"optimizer_state": engine.allocated_bytes()["optimizer_state"]}


@stages
@pytest.mark.world_size(1, 3, 4)
def test_each_rank_holds_its_shard_of_what_the_stage_shards(stage: int) -> None:
    full = 2 * (60 * 60 + 60) * 4
    shard = full // dist.get_world_size()
    wanted = {
        "parameters": shard if stage == 3 else full,
        "gradients": shard if stage >= 2 else full,
        "optimizer_state": 2 * (shard if stage >= 1 else full) + 4 * 4,  # and one step count for each of 4 parameters
    }
    assert allocated_bytes(stage) == wanted
