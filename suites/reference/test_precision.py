"""Loss scales, master weights, safe modules and memory of the reference engine, compared with torch's."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.errors import ConfigError, NonFiniteError, UsageError
from zharness.parity.bounds import gamma
from zharness.reference import Engine, initialize
from zharness.reference.mixed_precision.loss_scale import LossScale, LossScaleConfig
from zharness.world import assert_together

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FP16 = {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 64}}
AUTOCAST16 = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def start(stage: int, model: nn.Module | None = None, **keys: Any) -> Engine:
    optimizer = {"type": "SGD", "params": {"lr": 0.125}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=net() if model is None else model, config=config | keys)
    return engine


def test_the_scale_changes_as_in_torchs_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ours = LossScale(LossScaleConfig(2.0**10, 3), [])
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(()))
    draw = random.Random(0)  # noqa: S311 - a sequence of test cases
    for _ in range(200):
        overflow = draw.random() < 0.2
        weight.grad = torch.tensor(torch.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        ours.update(overflow)
        assert ours.value == scaler.get_scale()


@pytest.mark.parametrize(
    ("scaling", "overflows", "values"),
    [
        (LossScaleConfig(8.0, 2, hysteresis=2), "xx.x", [8, 4, 4, 2]),
        (LossScaleConfig(8.0, 2, hysteresis=2), "x..x", [8, 8, 16, 16]),
        (LossScaleConfig(8.0, 9, hysteresis=2, consecutive_hysteresis=True), "x.x", [8, 8, 8]),
        (LossScaleConfig(8.0, None), "xx..", [8, 8, 8, 8]),
        (LossScaleConfig(8.0, 2, min_scale=3.0), "xx..", [4, 3, 3, 6]),
    ],
)
def test_hysteresis_and_minimum_apply_to_the_scale(
    scaling: LossScaleConfig, overflows: str, values: list[float]
) -> None:
    scale = LossScale(scaling, [])
    for step, value in zip(overflows, values, strict=True):
        scale.update(step == "x")
        assert scale.value == value


def test_an_overflow_at_the_smallest_scale_raises() -> None:
    scale = LossScale(LossScaleConfig(1.0, 2, min_scale=1.0), [])
    with pytest.raises(NonFiniteError, match="smallest loss scale, 1"):
        scale.update(True)


@stages
@pytest.mark.parametrize("keys", [FP16, AUTOCAST16], ids=["fp16", "autocast"])
@pytest.mark.world_size(2)
def test_an_unscaled_backward_is_refused_and_every_way_to_scale_is_accepted(stage: int, keys: dict[str, Any]) -> None:
    engine = start(stage, **keys)
    inputs = torch.ones(2, 4)
    assert engine.needs_scaler()
    for unscaled in (lambda: engine(inputs).sum().backward(), lambda: engine(inputs).backward(torch.ones(2, 2))):
        with pytest.raises(UsageError, match=r"without the loss scale.*engine\.scale"):
            unscaled()
        engine.zero_grad()
    engine.backward(engine(inputs).float().sum() / 1024)
    wanted = engine.full_grads()
    for retained in (False, True):
        engine.zero_grad()
        loss = engine(inputs).float().sum() / 1024
        engine.scale(loss, retain_graph=retained).backward(retain_graph=retained)
        assert_together(all(torch.equal(g, wanted[name]) for name, g in engine.full_grads().items()), "scale")
    engine.backward(loss)
    twice = engine.full_grads()
    assert_together(all(torch.equal(g, 2 * wanted[name]) for name, g in twice.items()), "the retained graph")


@stages
@pytest.mark.world_size(2)
def test_a_reentrant_checkpoints_backward_is_part_of_the_scaled_one(stage: int) -> None:
    plain = net()
    found = []
    for recompute in (False, True):
        engine = start(stage, copy.deepcopy(plain), **FP16)
        inputs = torch.ones(2, 4, dtype=torch.float16, requires_grad=True)
        output = checkpoint(engine, inputs, use_reentrant=True) if recompute else engine(inputs)
        engine.backward(output.sum())
        found.append(engine.full_grads())
        engine.close()
    assert_together(all(torch.equal(g, found[1][name]) for name, g in found[0].items()), "recomputed")


@stages
@pytest.mark.world_size(2)
def test_an_external_scale_has_precedence_over_the_engines_own(stage: int) -> None:
    engine, inputs = start(stage, **FP16), torch.ones(2, 4)
    for scale in (64.0, 4.0, 64.0):
        engine.override_loss_scale(None if scale == 64.0 else scale)
        assert engine.loss_scale == scale
        loss = engine(inputs).float().sum()
        assert engine.scale(loss).item() == scale * loss.item()
        engine.backward(loss)
        engine.step()
    plain = start(stage)
    assert not plain.needs_scaler()
    plain.backward(plain(inputs).sum())
    wanted = plain.full_grads()
    plain.zero_grad()
    plain.override_loss_scale(0.25)
    plain.scale(plain(inputs).sum()).backward()
    assert plain.needs_scaler()
    assert_together(all(torch.equal(g, wanted[name]) for name, g in plain.full_grads().items()), "unscaled")
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="external loss scale"):
            plain.override_loss_scale(wrong)


@stages
@pytest.mark.world_size(2)
def test_a_skipped_step_changes_neither_weights_nor_schedule_and_drops_its_gradients(stage: int, rank: int) -> None:
    for keys in (FP16, {"bf16": {"enabled": True}}):
        engine = start(stage, **keys, scheduler={"type": "StepLR", "params": {"step_size": 1}})
        before, dtype = engine.full_masters(), engine.settings.precision.param_dtype
        loss = engine(torch.ones(2, 4).to(dtype)).float().sum()
        engine.backward(loss * (float("nan") if rank == 1 else 1.0))
        engine.step()
        after = engine.full_masters()
        assert_together(all(torch.equal(p, before[name]) for name, p in after.items()), "weights")
        assert (engine.steps, engine.skipped_steps, engine.full_grads()) == (0, 1, {})
        assert engine.optimizer.param_groups[0]["lr"] == 0.125
        engine.backward(engine(torch.ones(2, 4).to(dtype)).float().sum())
        engine.step()
        assert (engine.steps, engine.skipped_steps) == (1, 1)
        assert engine.optimizer.param_groups[0]["lr"] == 0.0125


@pytest.mark.world_size(1)
def test_the_step_that_raises_at_the_smallest_scale_is_counted_as_skipped() -> None:
    engine = start(1, fp16={"enabled": True, "initial_scale_power": 0})
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)).float().sum() * float("inf"))
    with pytest.raises(NonFiniteError, match="smallest loss scale"):
        engine.step()
    assert engine.skipped_steps == 1


@stages
@pytest.mark.world_size(1)
def test_a_parameter_that_is_trained_later_needs_the_loss_scale_too(stage: int) -> None:
    model = net().requires_grad_(False)
    model[0].requires_grad_(True)
    engine = start(stage, model.half(), **FP16)
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    with pytest.raises(UsageError, match="without the loss scale"):
        engine(torch.ones(2, 4)).float().sum().backward()


class One(nn.Module):
    """Returns the sum of its weights, all 1, so every gradient is 1 for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + 0 * x.sum()


@stages
@pytest.mark.world_size(2)
def test_micro_batches_add_up_in_the_master_dtype_if_gradients_are_sharded(stage: int) -> None:
    """1 + 2**-9 is not representable in bf16. A grad_accum_dtype other than the stage's is refused."""
    data_types = {"data_types": {"grad_accum_dtype": "fp32" if stage >= 2 else "bf16"}}
    engine = start(stage, One(), bf16={"enabled": True}, gradient_accumulation_steps=2, **data_types)
    for factor in (1.0, 2.0**-9):
        engine.backward(engine(torch.zeros(1, dtype=torch.bfloat16)) * factor)
    total = 1 + 2.0**-9 if stage >= 2 else 1.0
    assert engine.full_grads()["weight"].tolist() == [total / 2] * 6
    data_types["data_types"]["grad_accum_dtype"] = "bf16" if stage >= 2 else "fp32"
    with pytest.raises(ConfigError, match=f"grad_accum_dtype.*at stage {stage}"):
        start(stage, One(), bf16={"enabled": True}, **data_types)


@stages
@pytest.mark.world_size(3)
def test_finite_gradients_stay_finite_when_they_are_reduced_in_fp16(stage: int) -> None:
    """0.6 x 2**16 is finite in float16, three times that is not. Plain PyTorch, with an fp32 mean, steps."""
    for keys in ({"fp16": {"enabled": True}}, {"communication_data_type": "fp16"}):
        engine = start(stage, One(), **keys)
        scale = 2.0**16 / engine.loss_scale
        engine.backward((engine(torch.zeros(1)) * 0.6).float() * scale)
        local = torch.tensor(0.6 * 2.0**16).half().float() / 2.0**16 * scale
        mean = {name: grad.tolist() for name, grad in engine.full_grads().items()}
        engine.step()
        assert (engine.steps, engine.skipped_steps) == (1, 0), keys
        near = gamma(3, torch.float16) * local.item()
        assert_together(all(abs(each - local.item()) <= near for each in mean["weight"]), f"{mean} {local}")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(2)
def test_an_edit_that_a_step_on_the_master_weights_would_undo_is_refused(stage: int) -> None:
    engine = start(stage, bf16={"enabled": True})
    inputs = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(ZeroDivisionError), engine.gathered() as weights:
        weights["0.weight"].zero_().div_(1 // 0)
    with engine.gathered() as weights:
        weights["0.weight"].fill_(0.5)
    engine.backward(engine(inputs).float().sum())
    engine.step()
    engine.module.load_state_dict(engine.full_state_dict())
    engine.backward(engine(inputs).float().sum())
    with pytest.raises(UsageError, match=r"'0\.weight' was edited in place.*engine\.gathered\(\)"):
        engine.step()


@stages
@pytest.mark.world_size(1)
def test_accumulation_in_fp32_is_refused_for_a_bf16_model_without_masters(stage: int) -> None:
    data_types = {"data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(
        ConfigError,
        match=r"grad_accum_dtype is torch\.float32, but the gradients of parameter '0\.weight', which is torch\.bf",
    ):
        start(stage, net().bfloat16(), **data_types)
    start(stage, net(), **data_types)


MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.world_size(2)
def test_fp32_masters_keep_the_small_updates_that_bf16_masters_lose(stage: int) -> None:
    """Steps of 2**-12 from 1, where neighbouring bf16 values are 2**-8 apart."""
    engines = {
        "autocast": start(stage, One(), torch_autocast={"enabled": True}),
        "fp32 masters": start(stage, One(), bf16={"enabled": True}),
        "bf16 masters": start(stage, One(), **MASTERS),
    }
    weights = {}
    for name, engine in engines.items():
        engine.optimizer.param_groups[0]["lr"] = 2.0**-12
        for _ in range(12):
            engine.backward(engine(torch.zeros(1, dtype=torch.bfloat16)).float())
            engine.step()
        weights[name] = engine.full_params()["weight"][0].item()
    exact = 1 - 12 * 2.0**-12
    assert engines["fp32 masters"].full_masters()["weight"][0].item() == exact
    assert weights == {"autocast": exact, "fp32 masters": 1 - 2.0**-8, "bf16 masters": 1.0}


@stages
@pytest.mark.world_size(2)
def test_memory_is_reported_by_dtype_and_masters_belong_to_the_optimizer(stage: int, world_size: int) -> None:
    """Bytes of psi elements: parameters 4 psi under torch_autocast, in bf16 2 psi and masters 4 psi; momentum 4 psi."""
    psi = 40
    param, state = (world_size if stage < 3 else 1), (world_size if stage < 1 else 1)
    half = {"parameters": {"bfloat16": 2 * psi * param}, "optimizer_state": {"float32": 8 * psi * state}}
    full = {"parameters": {"float32": 4 * psi * param}, "optimizer_state": {"float32": 4 * psi * state}}
    low = {"parameters": {"bfloat16": 2 * psi * param}, "optimizer_state": {"bfloat16": 2 * psi * state}}
    cases = [({"bf16": {"enabled": True}}, half), ({"torch_autocast": {"enabled": True}}, full), (MASTERS, low)]
    for keys, wanted in cases[: 2 if stage == 0 else 3]:
        momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
        model = nn.Linear(8, 10, bias=False)
        engine = start(stage, model, **keys, optimizer=momentum)
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
        report = engine.memory_report()
        assert report.pop("gradients") == {}
        assert report == wanted
        assert engine.allocated_bytes()["optimizer_state"] == sum(wanted["optimizer_state"].values())


@pytest.mark.world_size(2)
def test_losses_under_torch_autocast_are_bitwise_equal_at_every_stage() -> None:
    """A sum of two ranks does not depend on the order, so nothing may differ. Clipping makes the norms matter."""
    curves = []
    for stage in range(4):
        engine = start(
            stage,
            torch_autocast={"enabled": True, "dtype": "bfloat16"},
            gradient_clipping=0.01,
            optimizer={"type": "AdamW", "params": {"lr": 0.01}},
        )
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(3):
            engine.backward(engine(torch.randn(2, 4)).float().pow(2).mean())
            engine.step()
        curves.append((engine.full_params(), engine.grad_norm()))
        assert engine.steps == 3
        engine.close()
    for weights, norm in curves[1:]:
        assert_together(all(torch.equal(p, curves[0][0][name]) for name, p in weights.items()), "weights")
        # Each stage sums the squares in float64 in another order.
        assert_together(abs(norm - curves[0][1]) <= gamma(56, torch.float64) * norm, f"norms {norm}, {curves[0][1]}")


@pytest.mark.world_size(1)
def test_parameters_of_a_module_that_is_not_safe_keep_their_reduce_dtype_even_if_tied() -> None:
    model = nn.Module()
    model.tokens, model.head, model.other = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(4, 4)
    model.head.weight = model.tokens.weight
    engine = start(0, model, torch_autocast={"enabled": True})
    formats = {name: original.dtypes for name, original in engine.model_params.items()}
    assert formats["tokens.weight"].reduce_dtype == torch.float32
    assert formats["other.weight"].reduce_dtype == formats["other.bias"].unshard_dtype == torch.bfloat16


class Asking(nn.Module):
    """A module that casts its input to the dtype of another module's weight, as PEFT's adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.inner.weight.dtype
        return torch.as_tensor(self.inner(x.to(self.seen)))


@pytest.mark.world_size(2)
def test_under_autocast_a_weight_keeps_its_dtype_for_other_modules() -> None:
    model = Asking()
    engine = start(3, model, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert engine(torch.ones(2, 4)).dtype is torch.bfloat16
    assert model.seen is torch.float32
