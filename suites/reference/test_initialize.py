"""``initialize``: optimizers, schedules, data and differing ranks; and the phases of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import zharness
from zharness.errors import ConfigError, UsageError
from zharness.reference import Engine, initialize
from zharness.reference.deepspeed_json.settings import OPTIMIZERS, SCHEDULERS
from zharness.world import assert_together

SGD = {"type": "SGD", "params": {"lr": 1.0}}
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def config(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "zero_optimization": {"stage": stage}} | keys


def start(stage: int = 3, **keys: Any) -> tuple[Engine, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config(stage, **keys))
    return engine, plain


def train(engine: Engine, inputs: Tensor) -> None:
    engine.backward(engine(inputs).pow(2).mean())
    engine.step()


@stages
@pytest.mark.world_size(2)
def test_every_configured_optimizer_is_torchs_own_on_the_mean_gradient(stage: int) -> None:
    for name, kind in OPTIMIZERS.items():
        engine, plain = start(stage, optimizer={"type": name, "params": {"lr": 0.01, **adam_as_torch(name)}})
        theirs = kind(plain.parameters(), lr=0.01)
        for step in range(2):
            engine.backward(engine(torch.full((2, 3), 0.3 + step)).pow(2).mean())
            grads = engine.full_grads()
            for key, p in plain.named_parameters():
                p.grad = grads[key]
            engine.step()
            theirs.step()
        weights = engine.full_params()
        assert_together(all(torch.equal(weights[k], p) for k, p in plain.named_parameters()), name)


def adam_as_torch(name: str) -> dict[str, bool]:
    return {"adam_w_mode": False} if name == "adam" else {}


SCHEDULES = {
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 2]},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9, "cycle_momentum": False},
    "StepLR": {"step_size": 1},
}


def rates(engine: Engine) -> list[float]:
    return [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.world_size(1)
def test_every_configured_schedule_is_torchs_own_and_steps_only_at_boundaries() -> None:
    for name, kind in SCHEDULERS.items():
        section = {"type": name, "params": SCHEDULES.get(name, {})}
        engine, plain = start(0, scheduler=section, gradient_accumulation_steps=2)
        theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
        schedule = kind(theirs, **section["params"])
        for _ in range(3):
            before = rates(engine)
            train(engine, torch.ones(2, 3))
            assert rates(engine) == before, name
            train(engine, torch.ones(2, 3))
            theirs.step()
            schedule.step()
            assert rates(engine) == [group["lr"] for group in theirs.param_groups], name


@pytest.mark.world_size(1)
def test_a_clients_schedule_is_returned_and_stepped() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model = nn.Linear(3, 2)
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    for given in (schedule, schedule(ours)):
        engine, optimizer, _, returned = initialize(model=model, config=config(1), optimizer=ours, lr_scheduler=given)
        assert optimizer is ours
        assert returned is engine.schedule
        before = rates(engine)
        train(engine, torch.ones(2, 3))
        assert rates(engine) == [rate / 2 for rate in before]
        engine.close()
        ours.state.clear()
        for group in ours.param_groups:
            group["params"] = list(model.parameters())


def elsewhere() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lr_scheduler": elsewhere()}, "another optimizer"),
        ({"lr_scheduler": 3}, "lr_scheduler is a int"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "step it yourself"),
        ({"config": config(scheduler={"type": "StepLR", "params": {"steps": 1}})}, "StepLR.*steps"),
        ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS cannot work on shards"),
        ({"optimizer": lambda leaves: torch.optim.LBFGS(leaves.values())}, "LBFGS cannot work on shards"),
    ],
)
@pytest.mark.world_size(2)
def test_a_refused_optimizer_or_schedule_leaves_the_model_unchanged(keys: dict[str, Any], words: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=words):
        initialize(model=model, **({"config": config()} | keys))
    assert model.weight.shape == (2, 3)


class Normed(torch.optim.SGD):
    """A client's optimizer that uses norms of full parameters."""


def muon(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
    kind = type("Mine", (torch.optim.Muon,), {})
    return kind([leaf for leaf in leaves.values() if leaf.dim() == 2] or [torch.zeros(2, 2)])


@pytest.mark.world_size(1)
def test_an_optimizer_outside_torch_needs_its_key_and_a_subclass_of_muon_is_refused() -> None:
    def build(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        return Normed(leaves.values(), lr=1.0)

    with pytest.raises(ConfigError, match=r"test_door\.Normed.*zero_allow_untested_optimizer: true"):
        initialize(model=nn.Linear(3, 2), config=config(1), optimizer=build)
    initialize(model=nn.Linear(3, 2), config=config(1, zero_allow_untested_optimizer=True), optimizer=build)
    initialize(model=nn.Linear(3, 2), config=config(0), optimizer=build)
    with pytest.raises(ConfigError, match="Muon cannot work on shards"):
        initialize(model=nn.Linear(3, 2), config=config(1, zero_allow_untested_optimizer=True), optimizer=muon)


@stages
@pytest.mark.world_size(2)
def test_a_clients_adagrad_that_has_not_stepped_gets_a_new_state(stage: int) -> None:
    model = nn.Linear(3, 2)
    ours = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    engine, optimizer, *_ = initialize(model=model, config=config(stage), optimizer=ours)
    assert optimizer is ours
    plain = copy.deepcopy(engine.module)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
    train(engine, torch.ones(2, 3))
    plain(torch.ones(2, 3)).pow(2).mean().backward()
    theirs.step()
    assert_together(all(torch.equal(engine.full_params()[k], p) for k, p in plain.named_parameters()), "Adagrad")


@stages
@pytest.mark.world_size(1)
def test_a_model_of_another_engine_is_refused_until_that_engine_is_closed(stage: int) -> None:
    engine, _ = start(stage)
    for model in (engine.module, nn.Sequential(engine.module[0])):
        with pytest.raises(ConfigError, match=r"belongs to another engine already.*close\(\)"):
            initialize(model=model, config=config(stage))
    whole = copy.deepcopy(engine.module)
    engine.close()
    if stage == 3:
        with pytest.raises(ConfigError, match="stay shards"):
            initialize(model=engine.module, config=config(stage))
    initialize(model=whole if stage == 3 else engine.module, config=config(stage))


@pytest.mark.world_size(2)
def test_a_refused_model_keeps_its_values_on_every_rank(rank: int) -> None:
    model = nn.BatchNorm1d(2)
    with torch.no_grad():
        for tensor in (model.weight, model.running_mean):
            tensor.fill_(rank + 1.0)
    with pytest.raises(ConfigError, match="SGD"):
        initialize(model=model, config=config(optimizer={"type": "SGD", "params": {"lrr": 1}}))
    assert [model.weight.tolist(), model.running_mean.tolist()] == [[rank + 1.0] * 2] * 2


def test_the_package_exports_initialize() -> None:
    assert zharness.initialize is initialize


@pytest.mark.world_size(2)
def test_training_data_is_divided_among_the_ranks_once_per_epoch(rank: int) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    *_, loader, _ = initialize(model=nn.Linear(1, 1), config=config(), training_data=data)
    assert loader is not None
    epochs = [[x.flatten().tolist() for (x,) in loader] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [2, 2, 2] == [len(batch) for batch in epochs[1]]
    assert epochs[0] != epochs[1], "a new epoch has a new order"
    loader.set_epoch(1)
    assert [x.flatten().tolist() for (x,) in loader] == epochs[1], "an epoch is found again by its number"
    every = [torch.zeros(6) for _ in range(2)]
    torch.distributed.all_gather(every, torch.tensor(epochs[0]).flatten())
    assert sorted(torch.cat(every).tolist()) == list(range(12))


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(1)


@pytest.mark.world_size(1)
def test_data_without_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="Endless without length"):
        initialize(model=nn.Linear(1, 1), config=config(), training_data=Endless())


def other_model(rank: int) -> dict[str, Any]:
    return {"model": nn.Linear(3, 2 + rank)}


def other_frozen(rank: int) -> dict[str, Any]:
    return {"model": nn.Linear(3, 2).requires_grad_(rank == 0)}


def other_stage(rank: int) -> dict[str, Any]:
    return {"config": config(rank)}


def other_rate(rank: int) -> dict[str, Any]:
    return {"optimizer": lambda leaves: torch.optim.SGD(leaves.values(), lr=1.0 + rank)}


def use_other_group(rank: int) -> dict[str, Any]:
    return {"optimizer": lambda leaves: torch.optim.SGD([leaves[("weight", "bias")[rank]]], lr=1.0)}


def omit_empty_leaf(rank: int) -> dict[str, Any]:
    """Build an optimizer without the bias on the rank that owns no element of it: groups differ between ranks."""
    build = lambda leaves: torch.optim.SGD([leaf for leaf in leaves.values() if leaf.numel()], lr=1.0)  # noqa: E731
    return {"model": nn.Linear(3, 1), "optimizer": build}


def misconfigure_one_rank(rank: int) -> dict[str, Any]:
    return {"config": config(7 if rank else 3)}


def raises_on_one(rank: int) -> dict[str, Any]:
    def build(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(leaves.values(), lr=-1.0 if rank else 1.0)

    return {"optimizer": build}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_model, r"'bias': torch\.float32 \(2,\), trained on rank 0; .*\(3,\), trained on rank 1"),
        (other_frozen, r"'bias': .*trained on rank 0; .*frozen on rank 1"),
        (other_stage, r"configuration: stage: 0 on rank 0; 1 on rank 1"),
        (other_rate, r"optimizer group 0: .*'lr': 1\.0.* on rank 0; .*'lr': 2\.0"),
        (use_other_group, r"optimizer group 0: \['weight'\].* on rank 0; \['bias'\].* on rank 1"),
        (omit_empty_leaf, r"optimizer group 0: \['weight', 'bias'\].* on rank 0; \['weight'\].* on rank 1"),
        (misconfigure_one_rank, r"outcome: accepted on rank 0; .*unknown zero_optimization\.stage '7'.* on rank 1"),
        (raises_on_one, r"outcome: accepted on rank 0; ValueError: Invalid learning rate.* on rank 1"),
    ],
)
@pytest.mark.world_size(2)
def test_ranks_that_differ_raise_together_and_name_the_difference(
    make: Callable[[int], dict[str, Any]], words: str, rank: int
) -> None:
    keys = {"model": nn.Linear(3, 2), "config": config()} | make(rank)
    before = keys["model"].weight.detach().clone()
    with pytest.raises(ConfigError, match=f"the ranks differ in .*{words}"):
        initialize(**keys)
    assert keys["model"].weight.shape == before.shape


@stages
@pytest.mark.world_size(2)
def test_no_sync_defers_reduction_at_stages_0_and_1_and_is_refused_at_2_and_3(stage: int, rank: int) -> None:
    engine, _ = start(stage)
    inputs = torch.full((2, 3), 1.0 + rank)
    if stage >= 2:
        with (
            pytest.raises(UsageError, match=f"no_sync at stage {stage}.*gradient_accumulation_steps"),
            engine.no_sync(),
        ):
            raise AssertionError("the block was entered")
        return
    engine.comm.reset()
    with engine.no_sync():
        engine.backward(engine(inputs).sum())
        with pytest.raises(UsageError, match="inside no_sync"):
            engine.step()
    assert not engine.comm.tallies
    engine.backward(engine(inputs).sum())
    twice = engine.full_grads()
    engine.zero_grad()
    engine.backward(2 * engine(inputs).sum())
    assert_together(all(torch.equal(g, twice[n]) for n, g in engine.full_grads().items()), "both backwards count")


@pytest.mark.world_size(1)
def test_an_engine_that_was_closed_inside_no_sync_stays_closed() -> None:
    engine, _ = start(1)
    with engine.no_sync():
        engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.step()


@stages
@pytest.mark.world_size(2)
def test_a_step_of_the_optimizer_itself_is_refused(stage: int) -> None:
    engine, _ = start(stage)
    engine.backward(engine(torch.ones(2, 3)).sum())
    with pytest.raises(UsageError, match=r"call engine\.step\(\), and engine\.zero_grad\(\)"):
        engine.optimizer.step()
    before = engine.full_params()
    engine.step()
    assert_together(any(not torch.equal(p, before[name]) for name, p in engine.full_params().items()), "the engine's")
    engine.close()
    engine.optimizer.step()


@stages
@pytest.mark.world_size(1)
def test_methods_of_a_closed_engine_raise(stage: int) -> None:
    engine, _ = start(stage)
    loss = engine(torch.ones(2, 3)).sum()
    engine.close()
    engine.close()
    for verb in (lambda: engine.backward(loss), lambda: engine.scale(loss), engine.step, lambda: engine(torch.ones(3))):
        with pytest.raises(UsageError, match="the engine is closed"):
            verb()


@pytest.mark.world_size(1)
def test_only_a_tensor_of_one_element_is_a_loss() -> None:
    engine, _ = start(0)
    for loss in (engine(torch.ones(2, 3)), 3.0):
        with pytest.raises(UsageError, match="a loss is a tensor of one element"):
            engine.backward(loss)


@stages
@pytest.mark.world_size(2)
def test_a_parameter_added_to_the_optimizer_alone_is_refused_at_the_next_step(stage: int) -> None:
    engine, _ = start(stage)
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
    engine.backward(engine(torch.ones(2, 3)).sum())
    with pytest.raises(ConfigError, match=r"shape \(7,\) that is not one of the leaves"):
        engine.step()
