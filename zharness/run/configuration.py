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

from zharness.checks.dtypes import DTYPES
from zharness.checks.usual import AS_USUAL, USUAL, Training
from zharness.engines.optimizers import ELEMENTWISE
from zharness.engines.protocol import OptimizerSpec
from zharness.errors import ConfigError

SUFFIX = ".json"
# How many samples there are is the batch function's matter, and the laws feed each rank micro-batches of its own.
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# The laws run at one loss scale; precision.grad_scaler has the dynamic one.
SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
FLAT = {"torch_adam", "adam_w_mode", "bias_correction"}  # of DeepSpeed's Adam alone
KERNELS = "optimizer.params.torch_adam"
SECTIONS = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
    "zero_optimization": '{"stage": 2}',
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "torch_autocast": '{"enabled": true, "dtype": "bf16"}',
}

_handed_over: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Configuration:
    """``options`` go to the engine; ``stage`` and ``dtype`` are None where the file does not say.

    ``autocast`` is the dtype of torch_autocast, ``wire`` that of communication_data_type, ``left_out`` what of the file
    no law looks at.
    """

    training: Training = AS_USUAL
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    dtype: str | None = None
    autocast: torch.dtype | None = None
    wire: torch.dtype | None = None
    left_out: tuple[str, ...] = ()


def is_file(engine_variant: str) -> bool:
    """Whether a case's engine variant is the path of a configuration."""
    return engine_variant.endswith(SUFFIX)


def hand_over(name: str, config: Mapping[str, Any]) -> None:
    """Have ``config`` found under ``name``, which ends in .json, here and in every process forked from here on."""
    _handed_over[name] = config


def take_back(name: str) -> None:
    """Forget what was handed over under ``name``."""
    _handed_over.pop(name, None)


def configuration(name: str) -> Configuration:
    """What the file ``name`` says. Raises ConfigError where it cannot be read, or a law cannot be held to it.

    Read each time: the file may be edited between two calls of one process.
    """
    return read(name, _handed_over[name] if name in _handed_over else loaded(name))


def loaded(name: str) -> Mapping[str, Any]:
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


def read(name: str, config: Mapping[str, Any]) -> Configuration:
    """``config`` taken apart. Raises ConfigError by key for what cannot be."""
    require_plain(name, config)
    require_sections(name, config)
    rest = {key: value for key, value in config.items() if key not in (*SIZES, "scheduler", "optimizer")}
    zero = dict(rest.pop("zero_optimization", {}))
    stage = zero.pop("stage", None)
    dtype = precision(rest)
    cast, wire = rest.get("torch_autocast", {}), rest.get("communication_data_type")
    return Configuration(
        training=Training(
            optimizer=optimizer(name, config["optimizer"]) if "optimizer" in config else USUAL,
            clip=rest.pop("gradient_clipping", None) or None,
            accumulation=rest.pop("gradient_accumulation_steps", 1),
        ),
        options={**rest, **({"zero_optimization": zero} if zero else {})},
        stage=stage,
        dtype=dtype,
        autocast=dtype_of(name, "torch_autocast.dtype", cast.get("dtype", "bf16")) if cast.get("enabled") else None,
        wire=None if wire is None else dtype_of(name, "communication_data_type", wire),
        left_out=(*(key for key in (*SIZES, "scheduler") if key in config), *scaling(config), *kernels(config)),
    )


def require_sections(name: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a section that is no JSON object, and for two dtypes at once."""
    for key in SECTIONS:
        if key in config and not isinstance(config[key], Mapping):
            raise ConfigError(
                f"config {name!r}: {key} is {json.dumps(config[key], default=str)}; expected a JSON object, "
                f"as in {SECTIONS[key]}"
            )
    if all(config.get(dtype, {}).get("enabled", False) for dtype in ("bf16", "fp16")):
        raise ConfigError(f"config {name!r}: bf16.enabled and fp16.enabled are both true; enable one of them")


def require_plain(name: str, config: Mapping[str, Any], path: str = "") -> None:
    """Raises ConfigError for "auto", which a Trainer fills in and no engine knows."""
    for key, value in config.items():
        if value == "auto":
            raise ConfigError(
                f"config {name!r}: {path}{key} is 'auto', which the Trainer of transformers fills in; write its value"
            )
        if isinstance(value, Mapping):
            require_plain(name, value, f"{path}{key}.")


def optimizer(name: str, section: Mapping[str, Any]) -> OptimizerSpec:
    """The optimizer as torch has it: DeepSpeed's Adam is AdamW, but where adam_w_mode is false."""
    kind, params = str(section.get("type", "")).lower(), dict(section.get("params", {}))
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
        params.setdefault("weight_decay", 0.0)
    if kind not in ELEMENTWISE:
        raise ConfigError(
            f"config {name!r}: " + str(ConfigError.unknown("optimizer.type", section.get("type"), sorted(ELEMENTWISE)))
        )
    if not params.get("bias_correction", True):
        raise ConfigError(
            f"config {name!r}: optimizer.params.bias_correction is false, which torch's {ELEMENTWISE[kind].__name__}, "
            "that each step is held against, does not have; leave it out"
        )
    params = {key: value for key, value in params.items() if key not in FLAT}
    args: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    try:
        ELEMENTWISE[kind]([torch.nn.Parameter(torch.zeros(()))], **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config {name!r}: torch's {ELEMENTWISE[kind].__name__} refuses {args}: {error}") from error
    return OptimizerSpec(kind, {"lr": 1e-3, **args})


def kernels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The key that chooses between DeepSpeed's own Adam and torch's, where it is given: engines are handed torch's."""
    given = "torch_adam" in config.get("optimizer", {}).get("params", {})
    return (KERNELS,) if given else ()


def why(key: str) -> str:
    """Why no law looks at a key that is left out."""
    if key == KERNELS:
        return "every engine is handed an optimizer of torch.optim"
    return "batches are the batch function's; rate and loss scale stay constant"


def scaling(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of loss scaling that are left out, with their section."""
    return tuple(
        f"{section}.{key}" for section in ("bf16", "fp16") for key in SCALING if key in config.get(section, {})
    )


def precision(rest: dict[str, Any]) -> str | None:
    """The dtype that the sections bf16 and fp16 in ``rest`` ask for, which are left with what else they say."""
    found = None
    for dtype in ("bf16", "fp16"):
        section = dict(rest.pop(dtype, {}))
        if section.pop("enabled", False):
            found = dtype
            more = {key: value for key, value in section.items() if key not in SCALING}
            rest.update({dtype: more} if more else {})
    return found


def dtype_of(name: str, key: str, word: object) -> torch.dtype:
    """A dtype by DeepSpeed's word, or torch's. Raises ConfigError for another."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    text = str(word).removeprefix("torch.")
    text = short.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"config {name!r}: " + str(ConfigError.unknown(key, word, DTYPES)))
    return DTYPES[text]


def configured(engine_variant: str) -> Configuration:
    """The configuration of a case; one that says nothing where its engine variant is no file."""
    return configuration(engine_variant) if is_file(engine_variant) else Configuration()
