"""Models and comparisons for the tests of stage 3."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn

from zharness.reference import Engine, initialize

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}
ONE_BY_ONE = {"stage3_prefetch_bucket_size": 0}
BUCKET = 3000  # elements: two of the layers


class Layers(nn.Module):
    """A layer of each kind: embedding, convolution, norm, attention, LSTM, linear; and a module that is not used."""

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
    """Assert that ``got`` is the mean over ranks of the plain model's gradients.

    The error is at most gamma times the mean of |local gradient|, with gamma = (n+1)u / (1-(n+1)u) for n summands. On
    one rank and with one term the gradients are bitwise equal.
    """
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


class Recurrent(nn.Module):
    """A module that reads its weight once and uses it five times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(5):
            x = torch.tanh(x @ weight)
        return x
