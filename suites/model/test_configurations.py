"""Configurations as tutorials of DeepSpeed and transformers write them run on every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zharness
from suites.model.tiny import perceptron
from zharness.engines.json_options import translate_options
from zharness.errors import ConfigError
from zharness.run import Verdict
from zharness.run.auto_values import fill_auto_values
from zharness.run.configuration import load_json_object, parse_configuration, translate_configuration
from zharness.run.model_check import ModelCheckRequest, choose_nearest_stage
from zharness.run.schedules import schedule_factors

CONFIGS = Path(__file__).parent / "configs"
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.003, "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 1, "last_batch_iteration": 0}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_min_lr": 1e-4, "warmup_num_steps": 3, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": None, "warmup_num_steps": 3, "last_batch_iteration": 4}),
    ("WarmupCosineLR", {"total_num_steps": 11, "warmup_min_ratio": 0.1, "warmup_num_steps": 4}),
    ("WarmupCosineLR", {"total_num_steps": 11, "warmup_num_steps": 4, "last_batch_iteration": 2}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "last_batch_iteration": 3}),
]
REFUSED_BY_DEEPSPEED: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 0}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2.0}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": -1}),
    ("LRRangeTest", {"lr_range_test_step_size": 0}),
    ("WarmupLR", {"warmup_max_lr": "1e-3"}),
]
DEEPSPEED_RATES = """
import json, sys, torch
from deepspeed.runtime import lr_schedules
for kind, params in json.loads(sys.argv[1]):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.002)
    try:
        scheduler, rates = getattr(lr_schedules, kind)(optimizer, **params), []
    except (TypeError, ValueError):
        print("RATES", json.dumps(None))
        continue
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    print("RATES", json.dumps(rates))
"""


@pytest.mark.parametrize(
    ("engine", "file", "stage"),
    [
        ("deepspeed", "hugging_face_zero2", 2),
        ("deepspeed", "hugging_face_zero3", 3),
        ("fsdp2", "hugging_face_zero3", 3),
        ("ddp", "tutorial_zero2", 0),
        ("zero1", "tutorial_zero2", 1),
        ("reference", "tutorial_cifar", 0),
    ],
)
def test_a_file_of_a_tutorial_runs(engine: str, file: str, stage: int) -> None:
    stages = (stage,) if file == "tutorial_cifar" else ()
    path = CONFIGS / f"{file}.json"
    found = zharness.verify(perceptron, engine=engine, config=path, only=("model.configured",), stages=stages, jobs=1)
    assert found, found.table()
    (record,) = found.records
    assert (record.cell.stage, record.verdict) == (stage, Verdict.PASS)


def test_the_rates_are_those_of_deepspeed_s_own_schedulers() -> None:
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED_RATES, json.dumps([*SCHEDULERS, *REFUSED_BY_DEEPSPEED])],
        capture_output=True,
        text=True,
        check=True,
    )
    rates = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("RATES")]
    assert rates[len(SCHEDULERS) :] == [None] * len(REFUSED_BY_DEEPSPEED)
    for (kind, params), expected in zip(SCHEDULERS, rates, strict=False):
        factors = schedule_factors("ds.json", {"type": kind, "params": params}, 0.002)
        assert factors is not None
        assert [f"{factor * 0.002:.9g}" for factor in factors[:15]] == [f"{rate:.9g}" for rate in expected], (
            kind,
            params,
        )


@pytest.mark.parametrize(("kind", "params"), REFUSED_BY_DEEPSPEED)
def test_what_deepspeed_s_schedulers_refuse_is_refused(kind: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.\w+ is .*; expected a"):
        schedule_factors("ds.json", {"type": kind, "params": params}, 0.002)


def test_every_auto_that_the_trainer_leaves_is_named_at_once() -> None:
    config = {"zero_optimization": {"stage": "auto"}, "gradient_predivide_factor": "auto", "gradient_clipping": "auto"}
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage, gradient_predivide_factor are 'auto'"):
        fill_auto_values("ds.json", config)


def test_the_largest_rate_of_a_schedule_is_the_rate_of_the_file() -> None:
    config = {"optimizer": {"params": {"lr": 0.003}}, "scheduler": {"params": {"warmup_max_lr": "auto"}}}
    filled = fill_auto_values("ds.json", config)
    assert filled.config["scheduler"]["params"] == {"warmup_max_lr": 0.003}
    assert "0.003, the file's optimizer.params.lr" in filled.notices[0]
    config["optimizer"]["params"] = {"lr": "auto"}
    assert fill_auto_values("ds.json", config).config["scheduler"]["params"] == {"warmup_max_lr": 5e-5}


def test_every_auto_that_is_filled_has_a_line() -> None:
    for path in CONFIGS.glob("hugging_face_*.json"):
        config = load_json_object(str(path))
        filled = fill_auto_values(str(path), config)
        assert json.dumps(config).count('"auto"') == len(filled.notices) + 2, "the two batch sizes have a line as well"
        assert translate_configuration("deepspeed", str(path)).ignored_keys[:2] == (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
        )


def test_a_value_has_a_meaning_on_each_engine_or_is_named() -> None:
    path = str(CONFIGS / "hugging_face_zero2.json")
    sharded = translate_configuration("fsdp2", path)
    assert sharded.options == {"cpu_offload": True}
    assert "zero_optimization.offload_optimizer means {'cpu_offload': True} on fsdp2" in sharded.notices
    assert "fsdp2 has nothing like steps_per_print" in sharded.notices[-1]
    replicated = translate_configuration("ddp", str(CONFIGS / "tutorial_zero2.json"))
    assert replicated.options == {"bucket_cap_mb": 5e6 * 4 / 2**20}
    assert translate_configuration("deepspeed", path).options["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in translate_configuration("reference", path).options
    assert (
        translate_configuration("my_engine:factory", path).options == translate_configuration("reference", path).options
    )


def test_a_dtype_of_reductions_counts_only_where_the_engine_has_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"communication_data_type": "bfloat16"}))
    assert translate_configuration("fsdp2", str(path)).options == {"reduce_dtype": "bf16"}
    assert translate_configuration("fsdp2", str(path)).reduce_dtype is not None
    assert translate_configuration("ddp", str(path)).reduce_dtype is None


def test_a_key_that_deepspeed_does_not_have_is_refused_on_other_engines(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"overlap_com": True}}))
    with pytest.raises(ConfigError, match=r"no key 'zero_optimization\.overlap_com'; did you mean 'overlap_comm'"):
        translate_configuration("ddp", str(path))


@pytest.mark.parametrize(
    ("engine", "config", "message"),
    [
        (
            "ddp",
            {"zero_optimization": {"reduce_bucket_size": "5e8"}},
            r'reduce_bucket_size is "5e8"; expected a number',
        ),
        ("fsdp2", {"zero_optimization": {"offload_optimizer": "cpu"}}, r'offload_optimizer is "cpu"; expected a JSON'),
        ("ddp", {"amp": {"enabled": True}}, r"amp\.enabled is true, which ddp cannot do"),
        ("fsdp2", {"gradient_allreduce_op": "sum"}, r'gradient_allreduce_op is "sum", which fsdp2 cannot do'),
    ],
)
def test_a_value_that_cannot_be_translated_is_refused(engine: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_options(engine, "ds.json", config)


def test_a_key_that_is_not_translated_is_named_although_its_section_is() -> None:
    config = {
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True}},
    }
    assert translate_options("fsdp2", "ds.json", config).meaningless_keys == (
        "torch_autocast.lower_precision_safe_modules",
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.pin_memory",
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "WarmupDecayLR"}, "scheduler.params of WarmupDecayLR has no total_num_steps; add it"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "unknown scheduler parameter 'warmup_steps'"),
    ],
)
def test_a_scheduler_with_wrong_parameters_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configuration("ds.json", {"scheduler": section})


def test_a_scheduler_that_is_not_computed_is_named() -> None:
    assert parse_configuration("ds.json", {"scheduler": {"type": "OneCycle"}}).ignored_keys == ("scheduler",)


def test_the_stage_of_the_file_becomes_one_that_the_engine_has() -> None:
    lines: list[str] = []
    wanted = ModelCheckRequest("suites.model.tiny:perceptron", str(CONFIGS / "hugging_face_zero3.json"), "fsdp2")
    claims = zharness.engines.capabilities("fsdp2", 2)
    assert claims is not None
    request = wanted.build_request()
    assert choose_nearest_stage(request, wanted, lambda _engine, _stage: claims, lines.append).stages == (3,)
    wanted = ModelCheckRequest("suites.model.tiny:perceptron", str(CONFIGS / "hugging_face_zero3.json"), "zero1")
    claims = zharness.engines.capabilities("zero1", 1)
    assert claims is not None
    request = wanted.build_request()
    assert choose_nearest_stage(request, wanted, lambda _engine, _stage: claims, lines.append).stages == (1,)
    assert len(lines) == 1
    assert "zero1 has no stage 3, only 1; checked at stage 1" in lines[0]
