"""The loss scale of torch's engines: static in fp16, GradScaler's own under autocast, and none otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zharness import engines
from zharness.engines import EngineConfig, OptimizerSpec
from zharness.engines.loss_scaling import CallersGradScaler, LossScaler, NoLossScale, Progress, build_loss_scaler
from zharness.engines.protocol import Absent
from zharness.engines.torch_engine import read_autocast_dtype
from zharness.world import server as ranks

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}


def build(**config: Any) -> LossScaler:
    engine_config = EngineConfig(**config)
    return build_loss_scaler(engine_config, read_autocast_dtype(engine_config), torch.amp.GradScaler)


def backward(layer: nn.Linear, scaler: LossScaler, factor: float = 1.0) -> None:
    scaler.scale(factor * layer(torch.ones(1, 2)).sum()).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"dtype": "fp16", "loss_scale": 16.0}, 16.0),
        ({"options": AUTOCAST}, 65536.0),
        ({"options": {"torch_autocast": {"enabled": True, "dtype": "bf16"}}}, None),
        ({"options": {"torch_autocast": {"enabled": False, "dtype": "fp16"}}}, None),
        ({"dtype": "bf16"}, None),
    ],
)
def test_fp16_alone_has_a_loss_scale(config: dict[str, Any], scale: float | None) -> None:
    found = build(**config).read_scale()
    assert found == scale if scale is not None else isinstance(found, Absent)


@pytest.mark.parametrize(
    ("config", "after"), [({"dtype": "fp16", "loss_scale": 16.0}, 16.0), ({"options": AUTOCAST}, 32768.0)]
)
def test_an_overflow_skips_the_step_and_lowers_the_scale_unless_it_is_static(
    config: dict[str, Any], after: float
) -> None:
    layer = nn.Linear(2, 1)
    scaler, optimizer = build(**config), torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.clone()
    backward(layer, scaler, torch.inf)
    assert not scaler.step(optimizer)
    assert (scaler.read_scale(), scaler.skipped_steps) == (after, 1)
    assert torch.equal(layer.weight, before)
    optimizer.zero_grad()
    backward(layer, scaler)
    assert torch.equal(scaler.unscale(layer.weight.grad), torch.ones(1, 2))
    assert scaler.step(optimizer)
    assert torch.equal(layer.weight, before - 1)
    assert (scaler.read_scale(), scaler.skipped_steps) == (after, 1)


def test_a_gradient_that_is_written_is_scaled_as_the_others() -> None:
    layer = nn.Linear(2, 1, bias=False)
    scaler, optimizer = build(dtype="fp16", loss_scale=16.0), torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.clone()
    layer.weight.grad = scaler.rescale(torch.full((1, 2), 0.5))
    assert scaler.step(optimizer), "no loss was scaled before"
    assert torch.equal(layer.weight, before - 0.5)


def test_a_step_without_gradients_is_made() -> None:
    layer = nn.Linear(2, 1)
    scaler, optimizer = build(options=AUTOCAST), torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(2):
        scaler.unscale_in_place(optimizer)
        assert scaler.step(optimizer)
    assert (scaler.read_scale(), scaler.skipped_steps) == (65536.0, 0)


def train_one_element(clip: float | None) -> tuple[float, float]:
    """Train a model of one element, of which one rank has none, with FSDP1; return the weight and the loss scale."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    config = EngineConfig(stage=3, optimizer=OptimizerSpec("sgd", {"lr": 0.5}), clip=clip, options=AUTOCAST)
    engine = engines.get("fsdp1")(model, config)
    for factor in (2.0**-8, torch.inf, 2.0**-8):
        engine.backward(factor * engine(torch.ones(1, 1)).float().sum())
        engine.step()
        engine.zero_grad()
    weight, scale = engine.full_params()["weight"].item(), engine.observe().loss_scale
    assert isinstance(scale, float)
    engine.close()
    return weight, scale


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_rank_without_elements_of_fsdp1_takes_part_in_every_step(clip: float | None) -> None:
    found = ranks.run(train_one_element, clip, world_size=2)
    assert list(found) == [(1.0 - 2 * 0.5 * 2.0**-8, 32768.0)] * 2


def test_a_checkpoint_keeps_the_scale_and_one_without_it_loads_as_before() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def schedule() -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    scaler = build(options=AUTOCAST)
    backward(layer, scaler, torch.inf)
    scaler.step(optimizer)
    state = Progress(schedule(), scaler).state_dict()
    resumed = build(options=AUTOCAST)
    Progress(schedule(), resumed).load_state_dict(state)
    assert (resumed.read_scale(), resumed.skipped_steps) == (32768.0, 1)
    assert isinstance(resumed, CallersGradScaler)
    Progress(schedule(), resumed).load_state_dict(schedule().state_dict())
    assert resumed.read_scale() == 32768.0, "a checkpoint from before there was a scale leaves it as it is"
    plain = schedule()
    assert Progress(plain, NoLossScale()).state_dict() == plain.state_dict()
    Progress(plain, NoLossScale()).load_state_dict(plain.state_dict())
