"""Checkpoints of the reference engine: resumed bitwise, at any stage and world size; and the full state_dict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suites.reference.helpers import assert_same
from zharness.errors import CheckpointError
from zharness.reference import Engine, initialize
from zharness.world import run

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Tied, frozen, unused, tiny, empty, scalar and transposed parameters; running statistics differ by rank."""

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


def build_engine(
    stage: int, kind: str = "AdamW", net: type[nn.Module] = Net, seed: int = 0, **precision: dict[str, Any]
) -> Engine:
    """Build an engine with two parameter groups and a schedule."""
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
    """Train on batches that follow from the step, and from the rank unless ``same`` is "everywhere"."""
    losses = []
    for step in steps:
        torch.manual_seed(1000 * step + (0 if same == "everywhere" else dist.get_rank()))
        loss = engine(torch.randn(3, 5)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def collect_state(engine: Engine) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state in one dictionary."""
    state = {f"{n}/{k}": v for n, entry in engine.full_optimizer_state().items() for k, v in entry.items()}
    rates = torch.tensor([group["lr"] for group in engine.optimizer.param_groups])
    return {**engine.full_state_dict(), **state, "rates": rates, "steps": torch.tensor(engine.steps)}


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "SGD"), (2, "AdamW"), (3, "AdamW"), (3, "SGD")])
@pytest.mark.world_size(1, 3)
def test_a_resumed_engine_trains_bitwise_like_an_uninterrupted_one(
    stage: int, kind: str, shared_tmp_path: Path
) -> None:
    never = build_engine(stage, kind)
    train(never, range(2))
    saved = never.save_checkpoint(shared_tmp_path, client_state={"epoch": 4, "order": [1, 2], "seen": torch.ones(2)})
    resumed = build_engine(stage, kind, seed=5)
    train(resumed, range(7, 8))  # its previous state is replaced, and its gradients are dropped
    resumed.backward(resumed(torch.randn(3, 5)).sum())
    path, client_state = resumed.load_checkpoint(shared_tmp_path)
    assert (path, client_state["epoch"], client_state["order"]) == (saved, 4, [1, 2])
    assert_same(collect_state(resumed), collect_state(never))
    for ours, theirs in zip(train(resumed, range(2, 4)), train(never, range(2, 4)), strict=True):
        assert torch.equal(ours, theirs)
    assert_same(collect_state(resumed), collect_state(never))


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
    never, resumed = (build_engine(stage, net=Low, seed=seed, **PRECISIONS[name]) for seed in (0, 5))
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
        assert_same(collect_state(resumed), collect_state(never))
        assert_same(resumed.full_masters(), never.full_masters())
        step_in(never, step)
        step_in(resumed, step)
    assert_same(collect_state(resumed), collect_state(never))


class Low(nn.Sequential):
    """Layers that half precision trains on CPU."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Plain(Net):
    """``Net`` without running statistics, which differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)


def write(stage: int, folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = build_engine(stage, net=Plain)
    train(engine, range(2), same="everywhere")
    engine.save_checkpoint(folder)
    return collect_state(engine), train(engine, range(2, 3), same="everywhere")


def load_and_train(stage: int, folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = build_engine(stage, net=Plain, seed=3)
    engine.load_checkpoint(folder)
    return collect_state(engine), train(engine, range(2, 3), same="everywhere")


@pytest.mark.parametrize(
    ("source", "target"),
    [((0, 1), (3, 4)), ((1, 2), (0, 3)), ((2, 3), (1, 2)), ((3, 4), (2, 1)), ((3, 2), (3, 8))],
    ids=lambda place: f"stage{place[0]}-w{place[1]}",
)
def test_another_stage_at_another_world_size_reads_the_same_state(
    source: tuple[int, int], target: tuple[int, int], tmp_path: Path
) -> None:
    written, losses = run(write, source[0], tmp_path, world_size=source[1])[0]
    for found, other in run(load_and_train, target[0], tmp_path, world_size=target[1]):
        assert_same(found, written)
        assert torch.equal(other[0], losses[0])


@stages
@pytest.mark.world_size(1, 3)
def test_the_full_state_dict_equals_the_plain_models_and_loads_into_it(stage: int) -> None:
    engine = build_engine(stage)
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
def test_load_module_only_loads_the_weights_alone(shared_tmp_path: Path) -> None:
    source = build_engine(2)
    train(source, range(1))
    source.save_checkpoint(shared_tmp_path, "best")
    target = build_engine(3, "SGD", seed=5)
    with pytest.raises(CheckpointError, match="optimizer AdamW, but this engine has SGD; pass load_module_only"):
        target.load_checkpoint(shared_tmp_path)
    target.load_checkpoint(shared_tmp_path, "best", load_module_only=True)
    assert target.steps == 0
    assert target.full_optimizer_state() == {}
    assert_same(target.full_state_dict(), source.full_state_dict())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_a_load_that_is_not_strict_loads_what_both_models_have(stage: int, shared_tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}

    def build(value: float, other: str) -> Engine:
        model = nn.ModuleDict({"common": nn.Linear(3, 2), other: nn.Linear(2, 1)})
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        return initialize(model=model, config=config, optimizer=lambda leaves: torch.optim.SGD(leaves.values()))[0]

    build(1.0, "saved").save_checkpoint(shared_tmp_path)
    target = build(2.0, "kept")
    for strict in (True, False):
        if strict:
            with pytest.raises(CheckpointError, match=r"'kept\.weight' is missing in the checkpoint"):
                target.load_checkpoint(shared_tmp_path, load_module_only=True)
        else:
            target.load_checkpoint(shared_tmp_path, load_module_only=True, load_module_strict=False)
        expected = {"common": 2.0 if strict else 1.0, "kept": 2.0}
        for name, value in target.full_params().items():
            assert torch.equal(value, torch.full_like(value, expected[name.partition(".")[0]])), name


class Single(nn.Module):
    """A model of one parameter with one element, the shape of an optimizer's step count."""

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
def test_the_step_count_of_a_parameter_of_one_element_stays_a_count(
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
    """A model with dropout from this rank's generator that counts its forwards in its extra state."""

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


def train_and_save(stage: int, folder: Path) -> list[float]:
    """Train ranks with different generators and extra state, save, and return the next loss."""
    engine = build_engine(stage, net=Noisy)
    torch.manual_seed(dist.get_rank())
    x = torch.ones(3, 5)
    for _ in range(1 + dist.get_rank()) if stage == 0 else (1,):
        engine(x)
    engine.save_checkpoint(folder, client_state={"generator": torch.get_rng_state()})
    return [engine(x).sum().item(), engine.module.forwards["count"]]


def resume(stage: int, folder: Path) -> list[float]:
    engine = build_engine(stage, net=Noisy)
    engine.module.forwards["count"] = 77
    _, client_state = engine.load_checkpoint(folder)
    torch.set_rng_state(client_state["generator"])
    return [engine(torch.ones(3, 5)).sum().item(), engine.module.forwards["count"]]


def keep_and_go_on(stage: int, folder: Path) -> tuple[list[float], list[float]]:
    return train_and_save(stage, folder), resume(stage, folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_gets_its_own_generators_and_extra_state_and_a_new_rank_gets_rank_0s(
    stage: int, tmp_path: Path
) -> None:
    kept, found = zip(*run(keep_and_go_on, stage, tmp_path, world_size=2), strict=True)
    assert kept == found
    assert kept[0] != kept[1]
    assert run(resume, stage, tmp_path, world_size=1) == [kept[0]]


@stages
@pytest.mark.world_size(2)
def test_the_full_state_dict_has_extra_state_and_a_model_without_it_does_not_fit(
    stage: int, shared_tmp_path: Path
) -> None:
    engine = build_engine(stage, net=Noisy)
    full = engine.full_state_dict()
    engine(torch.ones(3, 5))
    plain = Noisy()
    plain.load_state_dict(full)
    assert plain.forwards == {"count": 0}
    engine.save_checkpoint(shared_tmp_path)
    bare = type("Bare", (Noisy,), {"get_extra_state": nn.Module.get_extra_state})
    with pytest.raises(CheckpointError, match=r"it has the extra state \['_extra_state'\], this model has \[\]"):
        build_engine(stage, net=bare).load_checkpoint(shared_tmp_path)
