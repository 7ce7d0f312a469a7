"""Read a user's DeepSpeed JSON configuration: the settings of training and the options for the engine.

Every engine accepts these options. In a cell id the path of the file takes the place of the engine variant, as in
``deepspeed{ds_config.json}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zharness.engines.json_options import translate_options
from zharness.engines.optimizers import ELEMENTWISE
from zharness.engines.protocol import OptimizerSpec
from zharness.errors import ConfigError
from zharness.law_kit.default_training import DEFAULT_OPTIMIZER, DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.setting import DEFAULT_SETTING, Setting
from zharness.run.auto_values import fill_auto_values
from zharness.run.schedules import SCHEDULED_STEPS, SCHEDULES, schedule_factors

SUFFIX = ".json"
# The batch function decides how many samples there are, and the laws feed each rank its own micro-batches.
BATCH_SIZE_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
# The laws use one constant loss scale; precision.grad_scaler tests the dynamic one.
LOSS_SCALE_KEYS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "auto_cast",
)
DEEPSPEED_ADAM_KEYS = {"torch_adam", "adam_w_mode", "bias_correction"}  # torch's Adam has no such arguments
TORCH_ADAM_KEY = "optimizer.params.torch_adam"
SCHEDULE_NOTICE = (
    f"scheduler: every engine gets the rates that DeepSpeed's formulas give for the first {SCHEDULED_STEPS} steps"
)
SECTION_EXAMPLES = {
    "scheduler": '{"type": "WarmupLR"}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
    "zero_optimization": '{"stage": 2}',
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "torch_autocast": '{"enabled": true, "dtype": "bf16"}',
}

_registered_configs: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Configuration:
    """A user's parsed DeepSpeed configuration.

    ``training`` determines how the laws train, and ``options`` are passed to the engine. ``stage`` and ``dtype`` are
    None if the file does not set them. ``autocast_dtype`` is the dtype of ``torch_autocast``, and ``reduce_dtype`` is
    the value of ``communication_data_type``. ``ignored_keys`` are keys of the file that no law uses, and
    ``notices`` say what was filled in, computed or translated.
    """

    training: TrainingConfig = DEFAULT_TRAINING
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    dtype: str | None = None
    autocast_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    ignored_keys: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def is_config_file(engine_variant: str) -> bool:
    """Return whether an engine variant is the path of a configuration file."""
    return engine_variant.endswith(SUFFIX)


def cell_setting(engine_variant: str) -> Setting:
    """Return the setting that an engine variant names; a configuration file has the default setting.

    Raises UsageError if ``engine_variant`` is neither a setting nor a file.
    """
    return DEFAULT_SETTING if is_config_file(engine_variant) else Setting.parse(engine_variant)


def register_config(name: str, config: Mapping[str, Any]) -> None:
    """Register ``config`` under ``name``, which ends in .json, in this process and in processes that it forks later."""
    _registered_configs[name] = config


def unregister_config(name: str) -> None:
    """Remove the configuration that was registered as ``name``, if any."""
    _registered_configs.pop(name, None)


def load_configuration(name: str) -> Configuration:
    """Load the configuration that is registered as ``name``, or the file of that name.

    Raises ConfigError if the configuration cannot be read, or if no law can train with it. The file is read at each
    call, since it may be edited between two calls of one process.
    """
    return parse_configuration(
        name, _registered_configs[name] if name in _registered_configs else load_json_object(name)
    )


def load_json_object(name: str) -> Mapping[str, Any]:
    """Read the JSON object in the file ``name``. Raises ConfigError if the file cannot be read or has other content."""
    if set(name) & set("[]{}"):
        raise ConfigError(
            f"got the configuration {name!r}; the path becomes part of cell ids, so it must not contain [, ], {{ or }}"
        )
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the configuration {name!r} as a JSON file: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {name!r} contains a {type(content).__name__}; expected one JSON object")
    return content


def parse_configuration(name: str, config: Mapping[str, Any]) -> Configuration:
    """Parse a configuration. Raises ConfigError, with the name of the key, for a key that cannot be used."""
    filled = fill_auto_values(name, config)
    config = filled.config
    require_valid_sections(name, config)
    optimizer = parse_optimizer(name, config["optimizer"]) if "optimizer" in config else DEFAULT_OPTIMIZER
    scheduled = add_schedule(name, optimizer, config.get("scheduler"))
    remaining = {key: value for key, value in config.items() if key not in (*BATCH_SIZE_KEYS, "scheduler", "optimizer")}
    zero = dict(remaining.pop("zero_optimization", {}))
    stage = zero.pop("stage", None)
    dtype = pop_precision_dtype(remaining)
    autocast, reduce_dtype = remaining.get("torch_autocast", {}), remaining.get("communication_data_type")
    return Configuration(
        training=TrainingConfig(
            optimizer=scheduled or optimizer,
            clip=remaining.pop("gradient_clipping", None) or None,
            accumulation=remaining.pop("gradient_accumulation_steps", 1),
        ),
        options={**remaining, **({"zero_optimization": zero} if zero else {})},
        stage=stage,
        dtype=dtype,
        autocast_dtype=parse_dtype(name, "torch_autocast.dtype", autocast.get("dtype", "bf16"))
        if autocast.get("enabled")
        else None,
        reduce_dtype=None if reduce_dtype is None else parse_dtype(name, "communication_data_type", reduce_dtype),
        ignored_keys=(
            *(key for key in BATCH_SIZE_KEYS if key in config),
            *(("scheduler",) if "scheduler" in config and scheduled is None else ()),
            *ignored_loss_scale_keys(config),
            *ignored_kernel_keys(config),
        ),
        notices=(*filled.notices, *((SCHEDULE_NOTICE,) if scheduled is not None else ())),
    )


def add_schedule(name: str, optimizer: OptimizerSpec, section: Mapping[str, Any] | None) -> OptimizerSpec | None:
    """Return the optimizer with the learning rates of the section ``scheduler``, or None if they are not computed."""
    factors = None if section is None else schedule_factors(name, section, float(optimizer.args["lr"]))
    return None if factors is None else replace(optimizer, schedule=factors)


def require_valid_sections(name: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a section that is not a JSON object, and for bf16 and fp16 enabled together."""
    for key in SECTION_EXAMPLES:
        if key in config and not isinstance(config[key], Mapping):
            raise ConfigError(
                f"config {name!r}: {key} is {json.dumps(config[key], default=str)}; expected a JSON object, "
                f"as in {SECTION_EXAMPLES[key]}"
            )
    if all(config.get(dtype, {}).get("enabled", False) for dtype in ("bf16", "fp16")):
        raise ConfigError(f"config {name!r}: bf16.enabled and fp16.enabled are both true; enable one of them")


def parse_optimizer(name: str, section: Mapping[str, Any]) -> OptimizerSpec:
    """Return the torch optimizer that the section ``optimizer`` describes.

    DeepSpeed's Adam is AdamW unless adam_w_mode is false.
    """
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
            f"config {name!r}: optimizer.params.bias_correction is false, which torch's {ELEMENTWISE[kind].__name__} "
            "does not support, although each step is compared with that optimizer; remove the key"
        )
    params = {key: value for key, value in params.items() if key not in DEEPSPEED_ADAM_KEYS}
    args: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    try:
        ELEMENTWISE[kind]([torch.nn.Parameter(torch.zeros(()))], **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"config {name!r}: torch.optim.{ELEMENTWISE[kind].__name__} does not accept {args}: {error}"
        ) from error
    return OptimizerSpec(kind, {"lr": 1e-3, **args})


def ignored_kernel_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key ``torch_adam`` if it is set. The key has no effect, since every engine gets torch's optimizer."""
    is_set = "torch_adam" in config.get("optimizer", {}).get("params", {})
    return (TORCH_ADAM_KEY,) if is_set else ()


def explain_ignored_key(key: str) -> str:
    """Explain why no law uses an ignored key."""
    if key == TORCH_ADAM_KEY:
        return "every engine gets an optimizer of torch.optim"
    if key == "scheduler":
        return f"the learning rate stays constant; the rates of {', '.join(SCHEDULES)} are computed"
    return "the batch function sets the batch size; the loss scale stays constant"


def ignored_loss_scale_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the loss-scale keys of the sections bf16 and fp16 as ``section.key``.

    These keys are ignored, because the laws set the loss scale.
    """
    return tuple(
        f"{section}.{key}" for section in ("bf16", "fp16") for key in LOSS_SCALE_KEYS if key in config.get(section, {})
    )


def pop_precision_dtype(remaining_config: dict[str, Any]) -> str | None:
    """Remove the dtype from the sections bf16 and fp16 of ``remaining_config`` and return it.

    Returns None if neither section is enabled. Other keys of the enabled section stay.
    """
    enabled = None
    for dtype in ("bf16", "fp16"):
        section = dict(remaining_config.pop(dtype, {}))
        if section.pop("enabled", False):
            enabled = dtype
            others = {key: value for key, value in section.items() if key not in LOSS_SCALE_KEYS}
            remaining_config.update({dtype: others} if others else {})
    return enabled


def parse_dtype(name: str, key: str, value: object) -> torch.dtype:
    """Parse a dtype by the name that DeepSpeed or torch gives it. Raises ConfigError for an unknown name."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    text = str(value).removeprefix("torch.")
    text = short.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"config {name!r}: " + str(ConfigError.unknown_name(key, value, DTYPES)))
    return DTYPES[text]


def load_variant_configuration(engine_variant: str) -> Configuration:
    """Load the configuration of an engine variant; return an empty configuration if the variant is not a file."""
    return load_configuration(engine_variant) if is_config_file(engine_variant) else Configuration()


def translate_configuration(engine: str, engine_variant: str) -> Configuration:
    """Load the configuration of an engine variant, and translate its options to those of ``engine``.

    Keys without a meaning on this engine are among ``ignored_keys``. Raises ConfigError for a key that DeepSpeed does
    not have.
    """
    config = load_variant_configuration(engine_variant)
    if not is_config_file(engine_variant):
        return config
    translated = translate_options(engine, engine_variant, config.options)
    meaningless = f"{engine} has nothing like {', '.join(translated.meaningless_keys)}; these keys are ignored"
    return replace(
        config,
        options=translated.options,
        reduce_dtype=config.reduce_dtype if translated.sets_reduce_dtype else None,
        notices=(*config.notices, *translated.notices, *((meaningless,) if translated.meaningless_keys else ())),
    )
