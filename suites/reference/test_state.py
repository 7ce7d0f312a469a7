"""Checkpoints of the reference engine: resumed bitwise, at any stage and world size, and consolidated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at the first step: here once, else a second in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suites.reference.same import assert_same
from zharness.errors import CheckpointError
from zharness.reference import Engine, initialize
from zharness.world import run

# What the engine computes is judged here, in hundreds of collectives; comparing each of them doubles the time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Tied, frozen, unused, tiny, empty, scalar and transposed parameters, and statistics of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.b = nn.Linear(5, 7)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.transposed = nn.Parameter((torch.randn(4, 7) / 3).t())
        self.tiny = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.frozen(self.a(x)))) + self.b.bias
        return (h @ self.transposed) * self.tiny + self.scalar + self.empty.sum()


def built(
    stage: int, kind: str = "AdamW", net: type[nn.Module] = Net, seed: int = 0, **precision: dict[str, Any]
) -> Engine:
    """An engine with two groups and a schedule."""
    torch.manual_seed(seed)

    def build(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        biases = [leaf for name, leaf in leaves.items() if name.endswith("bias")]
        others = [leaf for name, leaf in leaves.items() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "lr": 0.1, "weight_decay": 0.0}]
        if kind == "SGD":
            return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)

    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, **precision}
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    return initialize(model=net(), config=config, optimizer=build, lr_scheduler=halving)[0]


def train(engine: Engine, steps: range, same: str = "batches of each rank's own") -> list[Tensor]:
    """Batches that follow from the step, and from the rank unless ``same`` is "everywhere"."""
    losses = []
    for step in steps:
        torch.manual_seed(1000 * step + (0 if same == "everywhere" else dist.get_rank()))
        loss = engine(torch.randn(3, 5)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def everything(engine: Engine) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, flat."""
    state = {f"{n}/{k}": v for n, entry in engine.full_optimizer_state().items() for k, v in entry.items()}
    rates = torch.tensor([group["lr"] for group in engine.optimizer.param_groups])
    return {**engine.full_state_dict(), **state, "rates": rates, "steps": torch.tensor(engine.steps)}


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "SGD"), (2, "AdamW"), (3, "AdamW"), (3, "SGD")])
@pytest.mark.world_size(1, 3)
def test_a_resumed_engine_goes_on_as_if_it_had_never_stopped(stage: int, kind: str, shared_tmp_path: Path) -> None:
    never = built(stage, kind)
    train(never, range(2))
    saved = never.save_checkpoint(shared_tmp_path, client_state={"epoch": 4, "order": [1, 2], "seen": torch.ones(2)})
    resumed = built(stage, kind, seed=5)
    train(resumed, range(7, 8))  # what it was before is forgotten, its waiting gradients too
    resumed.backward(resumed(torch.randn(3, 5)).sum())
    path, client_state = resumed.load_checkpoint(shared_tmp_path)
    assert (path, client_state["epoch"], client_state["order"]) == (saved, 4, [1, 2])
    assert_same(everything(resumed), everything(never))
    for ours, theirs in zip(train(resumed, range(2, 4)), train(never, range(2, 4)), strict=True):
        assert torch.equal(ours, theirs)
    assert_same(everything(resumed), everything(never))


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}},
}


def step_in(engine: Engine, step: int) -> None:
    torch.manual_seed(1000 * step + dist.get_rank())
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.randn(3, 5).to(dtype)).pow(2).mean())
    engine.step()


@pytest.mark.parametrize(
    ("stage", "name"), [(0, "bf16"), (1, "fp16"), (2, "bf16 masters"), (3, "bf16"), (3, "fp16"), (3, "bf16 masters")]
)
@pytest.mark.world_size(2)
def test_masters_loss_scale_and_skipped_steps_are_resumed_too(stage: int, name: str, shared_tmp_path: Path) -> None:
    never, resumed = (built(stage, net=Low, seed=seed, **PRECISIONS[name]) for seed in (0, 5))
    for step in range(3):
        step_in(never, step)
    never.save_checkpoint(shared_tmp_path)
    resumed.load_checkpoint(shared_tmp_path)
    assert never.steps + never.skipped_steps == 3
    assert (never.skipped_steps > 0) == (name == "fp16")
    for step in range(3, 6):
        assert (resumed.loss_scale, resumed.steps, resumed.skipped_steps) == (
            never.loss_scale,
            never.steps,
            never.skipped_steps,
        )
        assert_same(everything(resumed), everything(never))
        assert_same(resumed.full_masters(), never.full_masters())
        step_in(never, step)
        step_in(resumed, step)
    assert_same(everything(resumed), everything(never))


class Low(nn.Sequential):
    """Layers that half precision trains on CPU."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Plain(Net):
    """Net without statistics that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)


def write(stage: int, folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = built(stage, net=Plain)
    train(engine, range(2), same="everywhere")
    engine.save_checkpoint(folder)
    return everything(engine), train(engine, range(2, 3), same="everywhere")


def read(stage: int, folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = built(stage, net=Plain, seed=3)
    engine.load_checkpoint(folder)
    return everything(engine), train(engine, range(2, 3), same="everywhere")


@pytest.mark.parametrize(
    ("source", "target"),
    [((0, 1), (3, 4)), ((1, 2), (0, 3)), ((2, 3), (1, 2)), ((3, 4), (2, 1)), ((3, 2), (3, 8))],
    ids=lambda place: f"stage{place[0]}-w{place[1]}",
)
def test_another_stage_at_another_world_size_reads_the_same_state(
    source: tuple[int, int], target: tuple[int, int], tmp_path: Path
) -> None:
    written, losses = run(write, source[0], tmp_path, world_size=source[1])[0]
    for found, other in run(read, target[0], tmp_path, world_size=target[1]):
        assert_same(found, written)
        assert torch.equal(other[0], losses[0])


@stages
@pytest.mark.world_size(1, 3)
def test_the_consolidated_state_is_vanilla_s_and_a_plain_model_loads_it(stage: int) -> None:
    engine = built(stage)
    train(engine, range(1))
    full, plain = engine.full_state_dict(), Net()
    wanted = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    assert {name: (value.shape, value.dtype) for name, value in full.items()} == wanted
    assert full["a.weight"] is full["b.weight"]
    assert "scratch" not in full
    plain.load_state_dict(full)
    engine.module.eval()
    plain.eval()
    x = torch.randn(3, 5)
    assert torch.equal(plain(x), engine(x))
    for name, value in engine.full_params().items():
        assert torch.equal(value, full[name]), name


@pytest.mark.world_size(2)
def test_weights_alone_are_taken_where_that_is_asked_for(shared_tmp_path: Path) -> None:
    source = built(2)
    train(source, range(1))
    source.save_checkpoint(shared_tmp_path, "best")
    target = built(3, "SGD", seed=5)
    with pytest.raises(CheckpointError, match="optimizer AdamW, this engine has SGD; load_module_only"):
        target.load_checkpoint(shared_tmp_path)
    target.load_checkpoint(shared_tmp_path, "best", load_module_only=True)
    assert target.steps == 0
    assert target.full_optimizer_state() == {}
    assert_same(target.full_state_dict(), source.full_state_dict())


class Single(nn.Module):
    """One parameter, of one number: the shape of every optimizer's counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def single(stage: int, kind: type[torch.optim.Optimizer]) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
    return initialize(model=Single(), config=config, optimizer=lambda leaves: kind(leaves.values()))[0]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
@pytest.mark.world_size(2)
def test_a_count_is_one_number_for_a_parameter_of_one_number_too(
    kind: type[torch.optim.Optimizer], shared_tmp_path: Path
) -> None:
    never, resumed = single(0, kind), single(1, kind)
    train(never, range(2))
    never.save_checkpoint(shared_tmp_path)
    resumed.load_checkpoint(shared_tmp_path)
    train(never, range(2, 3))
    train(resumed, range(2, 3))
    assert_same(resumed.full_params(), never.full_params())


class Noisy(nn.Module):
    """Draws from a generator of each rank's own, and counts its forwards in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.forwards = {"count": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.forwards["count"] += 1
        return F.dropout(self.inner(x), 0.5)

    def get_extra_state(self) -> dict[str, int]:
        return self.forwards

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.forwards = state


def keep(stage: int, folder: Path) -> list[float]:
    """Train with ranks that differ in their generators and their extra state, save, and give the loss that follows."""
    engine = built(stage, net=Noisy)
    torch.manual_seed(dist.get_rank())
    x = torch.ones(3, 5)
    for _ in range(1 + dist.get_rank()) if stage == 0 else (1,):
        engine(x)
    engine.save_checkpoint(folder, client_state={"generator": torch.get_rng_state()})
    return [engine(x).sum().item(), engine.module.forwards["count"]]


def go_on(stage: int, folder: Path) -> list[float]:
    engine = built(stage, net=Noisy)
    engine.module.forwards["count"] = 77
    _, client_state = engine.load_checkpoint(folder)
    torch.set_rng_state(client_state["generator"])
    return [engine(torch.ones(3, 5)).sum().item(), engine.module.forwards["count"]]


def keep_and_go_on(stage: int, folder: Path) -> tuple[list[float], list[float]]:
    return keep(stage, folder), go_on(stage, folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_generators_and_extra_state_are_each_rank_s_own_and_rank_0_s_for_a_new_one(stage: int, tmp_path: Path) -> None:
    kept, found = zip(*run(keep_and_go_on, stage, tmp_path, world_size=2), strict=True)
    assert kept == found
    assert kept[0] != kept[1]
    assert run(go_on, stage, tmp_path, world_size=1) == [kept[0]]


@stages
@pytest.mark.world_size(2)
def test_the_consolidated_state_has_extra_state_and_a_model_without_is_another(
    stage: int, shared_tmp_path: Path
) -> None:
    engine = built(stage, net=Noisy)
    full = engine.full_state_dict()
    engine(torch.ones(3, 5))
    plain = Noisy()
    plain.load_state_dict(full)
    assert plain.forwards == {"count": 0}
    engine.save_checkpoint(shared_tmp_path)
    bare = type("Bare", (Noisy,), {"get_extra_state": nn.Module.get_extra_state})
    with pytest.raises(CheckpointError, match=r"it has the extra state \['_extra_state'\], here is \[\]"):
        built(stage, net=bare).load_checkpoint(shared_tmp_path)
