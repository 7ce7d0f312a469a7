"""The configuration: every key is supported, ignored or refused by name; and optimizers of the client's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
from torch import Tensor, nn

from zharness.errors import ConfigError
from zharness.reference import Engine, initialize
from zharness.reference.deepspeed_json.settings import iter_ignored_keys, load_config, parse_config
from zharness.reference.mixed_precision.loss_scale import LossScaleConfig
from zharness.reference.mixed_precision.precision import AutocastConfig

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def masters(section: str, stage: int = 1, **keys: bool) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, section: {"enabled": True, **keys}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"gradient_acumulation_steps": 2},
            ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"],
        ),
        ({"zero_optimization": {"stage": 4}}, ["stage", "4", "0, 1, 2, 3"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ["offload_optimizer.device", "none, cpu"]),
        ({"zero_optimization": {"offload_optimiser": {}}}, ["did you mean 'offload_optimizer'"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, ["zero_quantized_weights", "True", "False"]),
        ({"zero_optimization": True}, ["zero_optimization", "True", "object"]),
        ({"prescale_gradients": True}, ["prescale_gradients", "divided once"]),
        ({"tensorboard": {"enabled": True}}, ["tensorboard", "disable"]),
        ({"tensorbord": {}}, ["did you mean 'tensorboard'"]),
        ({"activation_checkpointing": {"partition_activations": True}}, ["partition_activations", "torch.utils"]),
        ({"zero_optimization": {"cpu_offload": True}}, ["cpu_offload", "offload_optimizer"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, ["zenflow", "every update"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": "yes"}}}, ["adam_w_mode", "true or false"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["OneBitAdam", "did you mean 'NAdam'?"]),
        ({"optimizer": {"type": "LBFGS"}}, ["LBFGS", "closure"]),
        ({"optimizer": {"type": "muon"}}, ["Muon", "whole matrices"]),
        ({"optimizer": {"type": "Adafactor"}}, ["Adafactor", "rows and columns"]),
        ({"optimizer": {"type": "SparseAdam"}}, ["SparseAdam", "sparse"]),
        ({"optimizer": {"type": "SGD", "legacy": True}}, ["optimizer.legacy"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16 and bf16", "exclude"]),
        ({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}, ["fp16 and torch_autocast", "exclude"]),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, ["bf16 and torch_autocast", "exclude"]),
        ({"fp16": {"enabled": 1}}, ["fp16.enabled", "true or false"]),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, ["fp16.loss_scale", "-1"]),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ["fp16.loss_scale_window", "0"]),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, ["torch_autocast.dtype", "int8", "bf16"]),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ["torch_autocast.dtype", "not a lower precision"]),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linea"]}},
            ["torch.nn.Linea", "import"],
        ),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.init"]}},
            ["torch.nn.init", "not a class"],
        ),
        ({"communication_data_type": "fp8"}, ["communication_data_type", "fp8", "fp32, bf16, fp16"]),
        (masters("bf16", 3) | {"communication_data_type": "fp32"}, ["communication_data_type", "float32", "bfloat16"]),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ["grad_accum_dtype", "torch.bfloat16", "torch.float32"]),
        ({"data_types": {"param_dtype": "bf16"}}, ["data_types.param_dtype"]),
        ({"gradient_clipping": -1}, ["gradient_clipping", "-1"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps", "0"]),
        ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, ["7", "1 x 2 x 2 = 4"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler.type", "WarmupLR", "LinearLR"]),
        (masters("fp16", fp16_master_weights_and_grads=True), ["fp16_master", "offload_optimizer"]),
        (masters("bf16", bf16_optimizer_states=True), ["bf16_optimizer_states needs bf16_master"]),
        (masters("bf16", bf16_master_weights_and_grads=True), ["bf16_master", "bf16_optimizer_states", "torch.optim"]),
        (masters("bf16", 0, bf16_master_weights_and_grads=True, bf16_optimizer_states=True), ["stage 1, 2 or 3"]),
        (
            masters("bf16", 1, enabled=False, bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
            ["enabled"],
        ),
        (
            masters("bf16", 1, bf16_master_weights_and_grads=True)
            | {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}},
            ["exclude each other"],
        ),
    ],
)
def test_an_unsupported_key_or_value_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"train_micro_batch_size_per_gpu": 1, **config}, world_size=2)
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
    settings = parse_config(config, world_size=2)
    assert (settings.micro_batch_size, settings.accumulation_steps) == expected


def test_a_configuration_without_any_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        parse_config({}, world_size=1)


def nest_keys(keys: Iterable[str]) -> dict[str, Any]:
    """Convert dotted keys to nest_keys JSON."""
    made: dict[str, Any] = {}
    for path in keys:
        *sections, key = path.split(".")
        at = made
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = 1
    return made


def test_disabled_sections_fixed_values_and_ignored_keys_are_accepted() -> None:
    config = nest_keys(iter_ignored_keys())
    config["zero_optimization"] |= {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    sections = {"fp16": {"enabled": False}, "amp": {"enabled": False}, "wandb": {}, "prescale_gradients": False}
    assert parse_config({"train_batch_size": 1, **config, **sections}, world_size=1).stage == 3


def test_deepspeeds_keys_at_its_own_defaults_are_accepted() -> None:
    own = ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "profile")
    zero = {"load_from_fp32_weights": True, "pipeline_loading_checkpoint": False, "zenflow": None, "cpu_offload": False}
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, **zero},
        "seq_parallel_communication_data_type": "fp32",
        "activation_checkpointing": dict.fromkeys(own, False) | {"number_checkpoints": None},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False, "parallel_write": {"pipeline_stage": False}},
    }
    assert parse_config(config, world_size=1).stage == 2


def test_offload_to_the_cpu_is_a_no_op_on_the_cpu_and_refused_elsewhere() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    assert parse_config(config, world_size=1).stage == 0
    with pytest.raises(ConfigError, match=r"offload_optimizer\.device is 'cpu' and the model is on cuda"):
        parse_config(config, world_size=1, device_type="cuda")


def test_a_configuration_is_read_from_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 2}))
    assert load_config(path) == load_config(str(path)) == {"train_batch_size": 2}
    for text, message in (("{", "not a readable JSON"), ("[1]", "has a list")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="not a readable JSON"):
        load_config(tmp_path / "none.json")


USERS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": False},
    "torch_autocast": {
        "enabled": True,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
    },
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def test_a_users_configuration_of_torch_autocast_is_taken_as_written() -> None:
    precision = parse_config(USERS, world_size=1).precision
    assert precision.autocast == AutocastConfig(torch.bfloat16, (nn.Linear, nn.Conv2d))
    assert precision.loss_scaling is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fp16": {"enabled": True}}, LossScaleConfig(2.0**16, 1000, 1, False, 1.0)),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, LossScaleConfig(128.0, None, 1, False, 1.0)),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 3}},
            LossScaleConfig(16.0, 2, 3, False, 1.0),
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, LossScaleConfig(2.0**16, 2000)),
        ({"bf16": {"enabled": True}}, None),
    ],
)
def test_only_fp16_has_a_loss_scale(config: dict[str, Any], expected: LossScaleConfig | None) -> None:
    assert parse_config({"train_batch_size": 1, **config}, world_size=1).precision.loss_scaling == expected


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "Adam"}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"lr": 1e-3}}, torch.optim.AdamW),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW),
        ({"type": "SGD"}, torch.optim.SGD),
    ],
)
def test_adam_decays_as_deepspeeds_does(section: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    choice = parse_config({"train_batch_size": 1, "optimizer": section}, world_size=1).optimizer
    assert choice is not None
    assert choice.target_class is kind
    assert set(choice.kwargs) <= {"lr"}


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


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: {"optimizer": torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=1)},
            r"\(3, 3\).*not a parameter",
        ),
        (
            lambda model: {"optimizer": lambda leaves: torch.optim.SGD([torch.zeros(5)], lr=1)},
            r"\(5,\).*not one of the",
        ),
        (lambda model: {"optimizer": stepped(model)}, "stepped already"),
        (lambda model: {}, "no optimizer"),
        (lambda model: {"config": {"optimizer": {"type": "SGD", "params": {"speed": 1}}}}, "speed"),
        (lambda model: {"config": {"optimizer": SGD}, "model_parameters": [torch.zeros(3)]}, "not a parameter"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_model_is_refused(make: Callable[..., dict[str, Any]], words: str) -> None:
    refuse(make, words)


def refuse_integers() -> None:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"'count' is torch\.complex64"):
        start(model, config={"optimizer": SGD})


@pytest.mark.world_size(1)
def test_a_trained_parameter_of_a_dtype_that_is_not_real_is_refused_by_name() -> None:
    refuse_integers()


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


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_clients_optimizer_keeps_its_groups_and_its_schedule(stage: int) -> None:
    client_optimizer(stage)


def some_parameters(stage: int) -> None:
    model = nn.Linear(2, 2)
    engine = start(model, stage, config={"optimizer": SGD}, model_parameters=[{"params": model.bias, "lr": 2.0}])
    before = engine.full_params()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    after = engine.full_params()
    assert torch.equal(after["weight"], before["weight"])
    assert torch.equal(after["bias"], before["bias"] - Tensor([2.0, 2.0]))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_model_parameters_choose_what_the_configured_optimizer_updates(stage: int) -> None:
    some_parameters(stage)
