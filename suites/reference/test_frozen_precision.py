"""A frozen weight in fp32 is cast for a forward in low precision, and keeps its values in what the engine returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suites.reference.helpers import assert_same
from zharness.reference import Engine, initialize
from zharness.world import assert_together

pytestmark = pytest.mark.collectives("trusted")

MODES = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True, "loss_scale": 4.0}}}


class LoraLinear(nn.Module):
    """A frozen linear layer from 5 to 3 features in fp32, and two trained factors of rank 2 that are added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def start(stage: int, dtype: torch.dtype, model: nn.Module | None = None) -> Engine:
    optimizer = {"type": "SGD", "params": {"lr": 0.125}}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **MODES[dtype]}
    return initialize(model=model or LoraLinear(), config={**config, "zero_optimization": {"stage": stage}})[0]


def compute_loss(model: Any, dtype: torch.dtype) -> Tensor:
    output: Tensor = model(torch.arange(10.0).view(2, 5).to(dtype))
    return output.float().pow(2).sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.world_size(2)
def test_a_frozen_fp32_layer_trains_its_adapter_and_keeps_its_values(
    stage: int, dtype: torch.dtype, shared_tmp_path: Path
) -> None:
    original = {f"base.{name}": p.detach().clone() for name, p in LoraLinear().base.named_parameters()}
    plain = LoraLinear().to(dtype)
    compute_loss(plain, dtype).backward()
    engine = start(stage, dtype)
    engine.backward(compute_loss(engine, dtype))
    for name, grad in engine.full_grads().items():
        assert_together(torch.equal(grad, plain.get_parameter(name).grad.to(grad.dtype)), name)  # type: ignore[union-attr]
    engine.step()
    engine.save_checkpoint(shared_tmp_path, "saved")

    resumed = start((stage + 1) % 4, dtype)
    with resumed.gathered(["base.weight"]) as weights:
        weights["base.weight"].zero_()
    assert_together(not resumed.full_params()["base.weight"].any().item(), "an edit reaches the frozen weight")
    resumed.load_checkpoint(shared_tmp_path)
    for each in (engine, resumed):
        full = each.full_state_dict()
        assert_together(all(torch.equal(full[name], value) for name, value in original.items()), "frozen weights")
        assert_together({"down.weight", "up.weight"} == each.full_masters().keys(), "names of master weights")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.world_size(2)
def test_a_layer_that_is_unfrozen_later_trains_as_one_that_never_was_frozen(stage: int) -> None:
    unfrozen, never_frozen = (
        start(stage, torch.bfloat16, LoraLinear().requires_grad_(trains)) for trains in (False, True)
    )
    unfrozen.module.requires_grad_(True)
    for engine in (unfrozen, never_frozen):
        engine.backward(compute_loss(engine, torch.bfloat16))
        engine.step()
    assert_same(unfrozen.full_masters(), never_frozen.full_masters())
    assert_same(unfrozen.full_params(), never_frozen.full_params())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_a_trained_layer_that_is_frozen_later_is_reported_as_before(stage: int) -> None:
    engine = start(stage, torch.bfloat16)
    before = engine.full_params(), engine.full_masters()
    engine.module.requires_grad_(False)
    for found, wanted in zip((engine.full_params(), engine.full_masters()), before, strict=True):
        assert_same(found, wanted)
        assert_together({n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}, "dtypes")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.world_size(2)
def test_masters_start_from_the_weights_that_the_caller_passes(stage: int) -> None:
    """A model that is cast first gives DeepSpeed's convention: masters that are the rounded weights."""
    original = dict(LoraLinear().requires_grad_(True).named_parameters())
    wanted = {
        "as they are": {name: value.detach() for name, value in original.items()},
        "cast first": {name: value.detach().bfloat16().float() for name, value in original.items()},
    }
    models = {"as they are": LoraLinear(), "cast first": LoraLinear().bfloat16()}
    for convention, model in models.items():
        engine = start(stage, torch.bfloat16, model.requires_grad_(True))
        assert_same(engine.full_masters(), wanted[convention])
