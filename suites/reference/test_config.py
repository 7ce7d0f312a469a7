"""The reference engine's way in: every key honoured, harmless or refused by name; optimizers of the client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at the first step: here once, else a second in every rank
from torch import Tensor, nn

from zharness.errors import ConfigError
from zharness.reference import Engine, initialize
from zharness.reference.config import harmless_keys, read
from zharness.world import run

SGD = {"type": "SGD", "params": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"gradient_acumulation_steps": 2},
            ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"],
        ),
        ({"zero_optimization": {"stage": 4}}, ["stage", "4", "0, 1, 2, 3"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["zero_optimization.offload_optimizer"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["OneBitAdam", "AdamW"]),
        ({"optimizer": {"type": "SGD", "legacy": True}}, ["optimizer.legacy"]),
        ({"fp16": {"enabled": True}}, ["fp16", "fp32"]),
        ({"bf16": {"enabled": True}}, ["bf16", "fp32"]),
        ({"gradient_clipping": -1}, ["gradient_clipping", "-1"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps", "0"]),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, ["7", "1 x 2 x 2 = 4"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler", "honoured"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read({"train_micro_batch_size_per_gpu": 1, **config}, world_size=2)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 24}, (12, 1)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 6)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_micro_batch_size_per_gpu": 5}, (5, 1)),
    ],
)
def test_the_missing_one_of_three_batch_sizes_follows_from_the_others(
    config: dict[str, int], expected: tuple[int, int]
) -> None:
    settings = read(config, world_size=2)
    assert (settings.micro_batch_size, settings.accumulation_steps) == expected


def test_a_configuration_without_any_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        read({}, world_size=1)


def test_disabled_precision_sections_and_harmless_keys_are_accepted() -> None:
    zero = {key.removeprefix("zero_optimization."): 1 for key in harmless_keys() if key.startswith("zero_")}
    top = {key: 1 for key in harmless_keys() if not key.startswith("zero_")}
    sections = {"fp16": {"enabled": False}, "bf16": {}}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **zero}, **top, **sections}
    assert read(config, world_size=1).stage == 3


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "Adam"}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"lr": 1e-3}}, torch.optim.AdamW),
        ({"type": "SGD"}, torch.optim.SGD),
    ],
)
def test_adam_decays_as_deepspeeds_does(section: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    choice = read({"train_batch_size": 1, "optimizer": section}, world_size=1).optimizer
    assert choice is not None
    assert choice.kind is kind
    assert set(choice.args) <= {"lr"}


def start(model: nn.Module, stage: int = 3, **kwargs: Any) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **kwargs.pop("config", {})}
    engine, optimizer, loader, scheduler = initialize(model=model, config=config, **kwargs)
    assert optimizer is engine.optimizer
    assert loader is None
    assert scheduler is None
    return engine


def refuse(make: Callable[[nn.Module], dict[str, Any]], words: str) -> None:
    model = nn.Linear(2, 2)
    arguments = make(model)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match=words):
        start(model, **arguments)
    assert type(model) is nn.Linear
    assert torch.equal(model.weight, before), "a refused model stays as it was"


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: {"optimizer": torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=1)}, r"\(3, 3\).*no parameter"),
        (lambda model: {"optimizer": lambda leaves: torch.optim.SGD([torch.zeros(5)], lr=1)}, r"\(5,\).*none of the"),
        (lambda model: {"optimizer": stepped(model)}, "stepped already"),
        (lambda model: {}, "no optimizer"),
        (lambda model: {"config": {"optimizer": {"type": "SGD", "params": {"speed": 1}}}}, "speed"),
        (lambda model: {"config": {"optimizer": SGD}, "model_parameters": [torch.zeros(3)]}, "no parameter"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_model_is_refused(make: Callable[..., dict[str, Any]], words: str) -> None:
    run(refuse, make, words, world_size=2)


def refuse_dtype() -> None:
    with pytest.raises(ConfigError, match=r"'weight' is torch\.bfloat16"):
        start(nn.Linear(2, 2).bfloat16(), config={"optimizer": SGD})


def test_a_model_that_is_not_fp32_is_refused_by_parameter_name() -> None:
    run(refuse_dtype)


def client_optimizer(stage: int) -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    ours = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.0}])
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0 if step == 0 else 0.0)
    engine = start(model, stage, optimizer=ours)
    assert engine.optimizer is ours
    moved = []
    for _ in range(2):
        before = engine.full_params()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        schedule.step()
        after = engine.full_params()
        moved.append({name: (before[name] - after[name]).tolist() for name in after})
    still = {"weight": [[0.0, 0.0], [0.0, 0.0]], "bias": [0.0, 0.0]}
    assert moved == [still | {"weight": [[0.5, 0.5], [0.5, 0.5]]}, still]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_clients_optimizer_keeps_its_groups_and_its_schedule(stage: int) -> None:
    run(client_optimizer, stage, world_size=2)


def some_parameters(stage: int) -> None:
    model = nn.Linear(2, 2)
    engine = start(model, stage, config={"optimizer": SGD}, model_parameters=[{"params": model.bias, "lr": 2.0}])
    before = engine.full_params()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    after = engine.full_params()
    assert torch.equal(after["weight"], before["weight"])
    assert torch.equal(after["bias"], before["bias"] - Tensor([2.0, 2.0]))


@pytest.mark.parametrize("stage", [0, 3])
def test_model_parameters_choose_what_the_configured_optimizer_updates(stage: int) -> None:
    run(some_parameters, stage, world_size=2)
