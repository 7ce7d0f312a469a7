"""Stage 3 on layers as people use them: real arithmetic, autocast, recurrent and attention layers, memory, failures."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # torch.optim imports it at the first step: here once, else a second in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import vmap

from zharness.errors import ConfigError, StaleGraphError
from zharness.reference import Engine, initialize, torch_private
from zharness.world import run

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class Layers(nn.Module):
    """One of each kind: embedding, convolution, norm, attention, recurrence, linear, and a module without forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.mixing = nn.ParameterList([torch.randn(10) / 3, torch.randn(10) / 3])
        self.unused = nn.Linear(3, 3)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(10, 4))

    def forward(self, tokens: Tensor) -> dict[str, list[Tensor]]:
        h = self.embed(tokens)
        h = torch.tanh(self.conv(h.transpose(1, 2))).transpose(1, 2)
        h = h + self.attention(self.norm(h), h, h, need_weights=False)[0]
        h, _ = self.lstm(h)
        return {"out": [self.out(h * self.mixing[0] + self.mixing[1])]}


class Mlp(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def pair(net: Callable[[], nn.Module], **zero: int) -> tuple[Engine, nn.Module]:
    torch.manual_seed(0)
    plain = net()
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **zero}}
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config)
    torch.manual_seed(1 + dist.get_rank())
    return engine, plain


def assert_mean(got: dict[str, Tensor], plain: nn.Module, terms: int = 1) -> None:
    """Within gamma x the mean of |local gradient|, gamma = (n+1)u / (1-(n+1)u) over n summands; bitwise on one rank."""
    world = dist.get_world_size()
    local = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert got.keys() == local.keys()
    steps = (world * terms + 1) * torch.finfo(torch.float32).eps / 2
    for name, grad in local.items():
        mean, size = grad.double(), grad.double().abs()
        dist.all_reduce(mean)
        dist.all_reduce(size)
        error = (got[name].double() - mean / world).abs()
        assert (error <= steps / (1 - steps) * size / world).all(), f"{name}: off by {error.max()}"
        if world == 1 and terms == 1:
            assert torch.equal(got[name], grad), name


def train_layers(autocast: bool) -> None:
    engine, plain = pair(Layers)
    tokens = torch.randint(0, 11, (3, 7))
    losses = []
    for model in (plain, engine):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_gradients_of_every_kind_of_layer_are_the_ranks_mean(autocast: bool, world_size: int) -> None:
    run(train_layers, autocast, world_size=world_size)


ONE_BY_ONE = {"stage3_prefetch_bucket_size": 0}
BUCKET = 3000  # elements: two of the layers


def peak_of_training(autocast: bool, bucket: int) -> None:
    engine, _ = pair(lambda: Mlp(width=32, depth=6), stage3_prefetch_bucket_size=bucket)
    module_bytes = (32 * 32 + 32) * 4
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = engine(torch.randn(3, 32, requires_grad=True))
        assert engine.gathered_bytes() == 0, "nothing stays gathered between forward and backward"
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        engine.step()
    assert engine.gathered_bytes() == 0
    assert module_bytes // (2 if autocast else 1) <= engine.peak_gathered_bytes() <= 2 * module_bytes + 4 * bucket


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_at_most_two_modules_and_a_bucket_are_gathered_while_training(autocast: bool, world_size: int) -> None:
    for bucket in (0, BUCKET):
        run(peak_of_training, autocast, bucket, world_size=world_size)


def peak_of_frozen() -> None:
    engine, _ = pair(lambda: Mlp(width=32, depth=6).requires_grad_(False), **ONE_BY_ONE)
    x = torch.randn(3, 32, requires_grad=True)
    loss = engine(x).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert engine.gathered_bytes() == 0
    assert engine.peak_gathered_bytes() <= 2 * (32 * 32 + 32) * 4
    assert engine.full_grads() == {}


def test_frozen_modules_are_let_go_one_by_one_too() -> None:
    run(peak_of_frozen, world_size=2)


def peak_of_vmap() -> None:
    engine, plain = pair(lambda: Mlp(width=32, depth=6), **ONE_BY_ONE)
    x = torch.randn(3, 32)
    vmap(plain)(x).pow(2).sum().backward()
    out = vmap(engine)(x)
    assert engine.gathered_bytes() == 0
    out.pow(2).sum().backward()
    assert_mean(engine.full_grads(), plain)
    assert engine.peak_gathered_bytes() <= 2 * (32 * 32 + 32) * 4


def test_training_through_vmap_holds_no_more_than_ordinary_training() -> None:
    run(peak_of_vmap, world_size=2)


class Projections(nn.Module):
    """Weights that torch.autocast casts inside modules that are no plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x, need_weights=False)[0] @ self.weight
        return torch.tanh(h) @ self.weight


def saved_bytes(out: Tensor) -> int:
    """Bytes that the graph behind ``out`` holds as they are."""
    stack, met, storages = [out.grad_fn], set(), {}
    while stack:
        node = stack.pop()
        for _, tensor in torch_private.saved_tensors(node):
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        below = {n for n, _ in node.next_functions if n is not None} - met
        met |= below
        stack += below
    return sum(storages.values())


def weights_computed_before() -> None:
    """torch's older weight_norm keeps a weight, and its graph, from construction on."""
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


def test_a_graph_that_is_older_than_the_engine_is_in_nobodys_way() -> None:
    run(weights_computed_before, world_size=2)


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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_gradients_are_reduced_densely(stage: int) -> None:
    run(sparse_gradients, stage, world_size=2)


def casts_that_autocast_makes() -> None:
    engine, plain = pair(Projections)
    x = torch.randn(1, 2, 32, requires_grad=True)
    held = []
    for model in (plain, engine):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = model(x)
        held.append(saved_bytes(out))
        out.float().pow(2).mean().backward()
    weights = 2 * sum(p.numel() for p in plain.parameters() if p.dim() == 2)
    assert held[0] - held[1] >= weights
    assert_mean(engine.full_grads(), plain)
    assert engine.gathered_bytes() == 0


def test_no_low_precision_copy_of_a_weight_waits_for_backward() -> None:
    run(casts_that_autocast_makes, world_size=2)


class Recurrent(nn.Module):
    """Reads its weight once and uses it often."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(5):
            x = torch.tanh(x @ weight)
        return x


def gathers_of_recurrence() -> None:
    engine, plain = pair(Recurrent)
    x = torch.randn(3, 8)
    plain(x).sum().backward()
    engine.comm.reset()
    out = engine(x)
    out.sum().backward(inputs=[engine.module._parameters["weight"]], retain_graph=True)
    assert engine.gathered_bytes() == 0
    calls = {kind.value: tally.calls for (kind, _), tally in engine.comm.tallies.items()}
    assert calls == {"all_gather": 2, "reduce_scatter": 1}
    assert_mean(engine.full_grads(), plain)


def test_a_weight_that_many_nodes_saved_is_gathered_once_per_backward() -> None:
    run(gathers_of_recurrence, world_size=2)


def step_between_retained_backwards(held: bool) -> None:
    engine, plain = pair(Mlp)
    x = torch.randn(3, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for call, step, error in ((plain, optimizer.step, RuntimeError), (engine, engine.step, StaleGraphError)):
        # Under a transform the copies are held by graphs that no promise reaches: torch's own check must see the step.
        out = torch.func.grad(lambda v, call=call: call(v).pow(2).sum())(x) if held else call(x)
        out.sum().backward(retain_graph=True)
        step()
        with pytest.raises(RuntimeError if held else error, match=r"changed since|modified by an inplace"):
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


@pytest.mark.parametrize("held", [False, True], ids=["promised", "held"])
def test_a_step_between_two_backwards_on_one_graph_is_refused_as_torch_refuses_it(held: bool) -> None:
    run(step_between_retained_backwards, held, world_size=2)


def without_a_look_at_saved_tensors() -> None:
    torch._C._autograd.SavedTensor = object  # this rank ends with the test
    engine, plain = pair(Mlp)
    x = torch.randn(3, 8, requires_grad=True)
    plain(x).sum().backward()
    out = engine(x)
    assert engine.gathered_bytes() == 4 * 8 * 8 * 4, "held, since nothing could be promised"
    out.sum().backward()
    assert engine.gathered_bytes() == 0
    assert_mean(engine.full_grads(), plain)


def test_where_torch_cannot_show_saved_tensors_copies_live_as_long_as_their_graph() -> None:
    run(without_a_look_at_saved_tensors, world_size=2)


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("broken on purpose")


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


def test_after_an_exception_in_forward_or_backward_the_next_step_is_right() -> None:
    run(failure_and_retry, world_size=2)


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


def test_names_and_classes_are_those_of_the_model_and_close_gives_the_classes_back() -> None:
    run(names_and_classes, world_size=3)


def script() -> None:
    with pytest.raises(ConfigError, match=r"torch\.jit"):
        initialize(model=nn.Sequential(torch.jit.script(nn.Linear(2, 2))), config=CONFIG)


def test_a_scripted_module_is_refused_by_name() -> None:
    run(script)
