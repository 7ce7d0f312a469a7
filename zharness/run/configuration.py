"""A user's configuration file: what the laws set themselves, what they train by, what the engine gets as it is.

It is DeepSpeed's JSON, which every engine's options are laid beside. In a case its path stands where a named variant of
the engine's options stands: ``deepspeed{ds_config.json}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zharness.engines.optimizers import ELEMENTWISE
from zharness.engines.protocol import OptimizerSpec
from zharness.errors import ConfigError
from zharness.law_kit.default_training import DEFAULT_OPTIMIZER, DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.dtypes import DTYPES

SUFFIX = ".json"
# How many samples there are is the batch function's matter, and the laws feed each rank micro-batches of its own.
BATCH_SIZE_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
# The laws run at one loss scale; precision.grad_scaler has the dynamic one.
LOSS_SCALE_KEYS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "auto_cast",
)
DEEPSPEED_ADAM_KEYS = {"torch_adam", "adam_w_mode", "bias_correction"}  # of DeepSpeed's Adam alone
TORCH_ADAM_KEY = "optimizer.params.torch_adam"
SECTION_EXAMPLES = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
    "zero_optimization": '{"stage": 2}',
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "torch_autocast": '{"enabled": true, "dtype": "bf16"}',
}

_registered_configs: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Configuration:
    """``options`` go to the engine; ``stage`` and ``dtype`` are None where the file does not say.

    ``autocast`` is the dtype of torch_autocast, ``wire`` that of communication_data_type, ``left_out`` what of the file
    no law looks at.
    """

    training: TrainingConfig = DEFAULT_TRAINING
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    dtype: str | None = None
    autocast_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    ignored_keys: tuple[str, ...] = ()


def is_config_file(engine_variant: str) -> bool:
    """Whether a case's engine variant is the path of a configuration."""
    return engine_variant.endswith(SUFFIX)


def register_config(name: str, config: Mapping[str, Any]) -> None:
    """Have ``config`` found under ``name``, which ends in .json, here and in every process forked from here on."""
    _registered_configs[name] = config


def unregister_config(name: str) -> None:
    """Forget what was handed over under ``name``."""
    _registered_configs.pop(name, None)


def load_configuration(name: str) -> Configuration:
    """What the file ``name`` says. Raises ConfigError where it cannot be read, or a law cannot be held to it.

    Read each time: the file may be edited between two calls of one process.
    """
    return parse_configuration(
        name, _registered_configs[name] if name in _registered_configs else load_json_object(name)
    )


def load_json_object(name: str) -> Mapping[str, Any]:
    """The JSON object in a file."""
    if set(name) & set("[]{}"):
        raise ConfigError(f"got the configuration {name!r}; its path becomes part of case ids: no []{{}}")
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {name!r} is no readable JSON file: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config {name!r} holds a {type(found).__name__}; expected one JSON object")
    return found


def parse_configuration(name: str, config: Mapping[str, Any]) -> Configuration:
    """``config`` taken apart. Raises ConfigError by key for what cannot be."""
    reject_auto_values(name, config)
    require_valid_sections(name, config)
    rest = {key: value for key, value in config.items() if key not in (*BATCH_SIZE_KEYS, "scheduler", "optimizer")}
    zero = dict(rest.pop("zero_optimization", {}))
    stage = zero.pop("stage", None)
    dtype = pop_precision_dtype(rest)
    cast, wire = rest.get("torch_autocast", {}), rest.get("communication_data_type")
    return Configuration(
        training=TrainingConfig(
            optimizer=parse_optimizer(name, config["optimizer"]) if "optimizer" in config else DEFAULT_OPTIMIZER,
            clip=rest.pop("gradient_clipping", None) or None,
            accumulation=rest.pop("gradient_accumulation_steps", 1),
        ),
        options={**rest, **({"zero_optimization": zero} if zero else {})},
        stage=stage,
        dtype=dtype,
        autocast_dtype=parse_dtype(name, "torch_autocast.dtype", cast.get("dtype", "bf16"))
        if cast.get("enabled")
        else None,
        reduce_dtype=None if wire is None else parse_dtype(name, "communication_data_type", wire),
        ignored_keys=(
            *(key for key in (*BATCH_SIZE_KEYS, "scheduler") if key in config),
            *ignored_loss_scale_keys(config),
            *ignored_kernel_keys(config),
        ),
    )


def require_valid_sections(name: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a section that is no JSON object, and for two dtypes at once."""
    for key in SECTION_EXAMPLES:
        if key in config and not isinstance(config[key], Mapping):
            raise ConfigError(
                f"config {name!r}: {key} is {json.dumps(config[key], default=str)}; expected a JSON object, "
                f"as in {SECTION_EXAMPLES[key]}"
            )
    if all(config.get(dtype, {}).get("enabled", False) for dtype in ("bf16", "fp16")):
        raise ConfigError(f"config {name!r}: bf16.enabled and fp16.enabled are both true; enable one of them")


def reject_auto_values(name: str, config: Mapping[str, Any], path: str = "") -> None:
    """Raises ConfigError for "auto", which a Trainer fills in and no engine knows."""
    for key, value in config.items():
        if value == "auto":
            raise ConfigError(
                f"config {name!r}: {path}{key} is 'auto', which the Trainer of transformers fills in; write its value"
            )
        if isinstance(value, Mapping):
            reject_auto_values(name, value, f"{path}{key}.")


def parse_optimizer(name: str, section: Mapping[str, Any]) -> OptimizerSpec:
    """The optimizer as torch has it: DeepSpeed's Adam is AdamW, but where adam_w_mode is false."""
    kind, params = str(section.get("type", "")).lower(), dict(section.get("params", {}))
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
        params.setdefault("weight_decay", 0.0)
    if kind not in ELEMENTWISE:
        raise ConfigError(
            f"config {name!r}: "
            + str(ConfigError.unknown_name("optimizer.type", section.get("type"), sorted(ELEMENTWISE)))
        )
    if not params.get("bias_correction", True):
        raise ConfigError(
            f"config {name!r}: optimizer.params.bias_correction is false, which torch's {ELEMENTWISE[kind].__name__}, "
            "that each step is held against, does not have; leave it out"
        )
    params = {key: value for key, value in params.items() if key not in DEEPSPEED_ADAM_KEYS}
    args: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    try:
        ELEMENTWISE[kind]([torch.nn.Parameter(torch.zeros(()))], **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config {name!r}: torch's {ELEMENTWISE[kind].__name__} refuses {args}: {error}") from error
    return OptimizerSpec(kind, {"lr": 1e-3, **args})


def ignored_kernel_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The key that chooses between DeepSpeed's own Adam and torch's, where it is given: engines are handed torch's."""
    given = "torch_adam" in config.get("optimizer", {}).get("params", {})
    return (TORCH_ADAM_KEY,) if given else ()


def explain_ignored_key(key: str) -> str:
    """Why no law looks at a key that is left out."""
    if key == TORCH_ADAM_KEY:
        return "every engine is handed an optimizer of torch.optim"
    return "batches are the batch function's; rate and loss scale stay constant"


def ignored_loss_scale_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of loss scaling that are left out, with their section."""
    return tuple(
        f"{section}.{key}" for section in ("bf16", "fp16") for key in LOSS_SCALE_KEYS if key in config.get(section, {})
    )


def pop_precision_dtype(remaining_config: dict[str, Any]) -> str | None:
    """The dtype that the sections bf16 and fp16 in ``rest`` ask for, which are left with what else they say."""
    found = None
    for dtype in ("bf16", "fp16"):
        section = dict(remaining_config.pop(dtype, {}))
        if section.pop("enabled", False):
            found = dtype
            more = {key: value for key, value in section.items() if key not in LOSS_SCALE_KEYS}
            remaining_config.update({dtype: more} if more else {})
    return found


def parse_dtype(name: str, key: str, value: object) -> torch.dtype:
    """A dtype by DeepSpeed's word, or torch's. Raises ConfigError for another."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    text = str(value).removeprefix("torch.")
    text = short.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"config {name!r}: " + str(ConfigError.unknown_name(key, value, DTYPES)))
    return DTYPES[text]


def configuration_for(engine_variant: str) -> Configuration:
    """The configuration of a case; one that says nothing where its engine variant is no file."""
    return load_configuration(engine_variant) if is_config_file(engine_variant) else Configuration()
