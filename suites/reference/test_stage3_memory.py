"""Stage 3: how long unsharded parameters live, and how often they are all-gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from suites.reference.stage3 import BUCKET, ONE_BY_ONE, Mlp, Recurrent, assert_mean, pair
from zharness import torch_private

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")


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


@pytest.mark.world_size(1, 3)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_at_most_two_modules_and_a_bucket_are_unsharded_during_training(autocast: bool) -> None:
    for bucket in (0, BUCKET):
        peak_of_training(autocast, bucket)


def peak_of_frozen() -> None:
    engine, _ = pair(lambda: Mlp(width=32, depth=6).requires_grad_(False), **ONE_BY_ONE)
    x = torch.randn(3, 32, requires_grad=True)
    loss = engine(x).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert engine.gathered_bytes() == 0
    assert engine.peak_gathered_bytes() <= 2 * (32 * 32 + 32) * 4
    assert engine.full_grads() == {}


@pytest.mark.world_size(2)
def test_frozen_modules_are_resharded_one_by_one_too() -> None:
    peak_of_frozen()


def peak_of_vmap() -> None:
    engine, plain = pair(lambda: Mlp(width=32, depth=6), **ONE_BY_ONE)
    x = torch.randn(3, 32)
    vmap(plain)(x).pow(2).sum().backward()
    out = vmap(engine)(x)
    assert engine.gathered_bytes() == 0
    out.pow(2).sum().backward()
    assert_mean(engine.full_grads(), plain)
    assert engine.peak_gathered_bytes() <= 2 * (32 * 32 + 32) * 4


@pytest.mark.world_size(2)
def test_training_through_vmap_needs_no_more_memory() -> None:
    peak_of_vmap()


class Projections(nn.Module):
    """Weights that torch.autocast casts in modules other than nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x, need_weights=False)[0] @ self.weight
        return torch.tanh(h) @ self.weight


def count_saved_bytes(out: Tensor) -> int:
    """Count the bytes of saved tensors without hooks in the graph behind ``out``."""
    stack, met, storages = [out.grad_fn], set(), {}
    while stack:
        node = stack.pop()
        for _, tensor in torch_private.iter_saved_tensors(node):
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        below = {n for n, _ in node.next_functions if n is not None} - met
        met |= below
        stack += below
    return sum(storages.values())


def casts_that_autocast_makes() -> None:
    engine, plain = pair(Projections)
    x = torch.randn(1, 2, 32, requires_grad=True)
    saved_bytes = []
    for model in (plain, engine):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = model(x)
        saved_bytes.append(count_saved_bytes(out))
        out.float().pow(2).mean().backward()
    weights = 2 * sum(p.numel() for p in plain.parameters() if p.dim() == 2)
    assert saved_bytes[0] - saved_bytes[1] >= weights
    assert_mean(engine.full_grads(), plain)
    assert engine.gathered_bytes() == 0


@pytest.mark.world_size(2)
def test_no_low_precision_copy_of_a_weight_is_kept_for_backward() -> None:
    casts_that_autocast_makes()


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


@pytest.mark.world_size(2)
def test_a_weight_that_many_nodes_saved_is_unsharded_once_per_backward() -> None:
    gathers_of_recurrence()


@pytest.mark.world_size(2)
def test_before_torch_2_13_unsharded_parameters_live_as_long_as_their_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C._autograd, "SavedTensor", object)
    engine, plain = pair(Mlp)
    x = torch.randn(3, 8, requires_grad=True)
    plain(x).sum().backward()
    out = engine(x)
    assert engine.gathered_bytes() == 4 * 8 * 8 * 4, "kept alive, since no saved tensor could be replaced"
    out.sum().backward()
    assert engine.gathered_bytes() == 0
    assert_mean(engine.full_grads(), plain)
