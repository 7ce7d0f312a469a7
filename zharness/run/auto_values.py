"""Fill the values "auto" of a DeepSpeed JSON as the Trainer of transformers does with its default arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zharness.engines.json_options import find_value
from zharness.errors import ConfigError
from zharness.run.schedules import SCHEDULED_STEPS

AUTO = "auto"
# The defaults of transformers.TrainingArguments (transformers/integrations/deepspeed.py, trainer_config_process).
TRAINER_DEFAULTS: Mapping[str, Any] = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "amp.enabled": False,
    "amp.opt_level": "O1",
}
OPTIMIZER_RATE, LARGEST_RATE = "optimizer.params.lr", "scheduler.params.warmup_max_lr"
# The reason why a value differs from the default of the Trainer.
REASONS: Mapping[str, str] = {
    "scheduler.params.warmup_num_steps": "the least that DeepSpeed accepts, since it refuses the 0 of the Trainer",
}
# The Trainer reads these from the model or the data, which the laws do not have.
DATA_KEYS = {
    "scheduler.params.total_num_steps": (SCHEDULED_STEPS, "the Trainer counts the steps of its data"),
}
# Sizes that the Trainer derives from the hidden size of the model. No number depends on them.
SIZE_KEYS = tuple(
    f"zero_optimization.{key}"
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")  # no law uses these keys


@dataclass(frozen=True)
class FilledConfig:
    """A configuration without "auto", and a sentence for each value that was filled."""

    config: Mapping[str, Any]
    notices: tuple[str, ...] = ()


def fill_auto_values(name: str, config: Mapping[str, Any]) -> FilledConfig:
    """Replace every "auto" in the configuration. Raises ConfigError with each key that the Trainer does not fill."""
    found = [path for path in find_auto_values(config) if path not in BATCH_KEYS]
    unknown = [path for path in found if path not in (*TRAINER_DEFAULTS, *DATA_KEYS, *SIZE_KEYS)]
    if unknown:
        raise ConfigError(
            f"config {name!r}: {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} 'auto', which the Trainer of "
            "transformers does not replace; write the values themselves"
        )
    values = {path: TRAINER_DEFAULTS.get(path, DATA_KEYS.get(path, (None,))[0]) for path in found}
    reasons = dict(REASONS)
    rate = find_rate(config)
    if LARGEST_RATE in values and rate is not None:
        values[LARGEST_RATE] = rate
        reasons[LARGEST_RATE] = f"the file's {OPTIMIZER_RATE}, since the Trainer has one learning rate"
    notices = tuple(explain_value(path, values[path], reasons) for path in found)
    return FilledConfig(replace_values(config, values), notices)


def find_rate(config: Mapping[str, Any]) -> Any:
    """Return the learning rate that the file gives the optimizer, or None."""
    rate = find_value(config, OPTIMIZER_RATE)
    return None if rate == AUTO else rate


def find_auto_values(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of each "auto": the keys from the outermost section, joined by dots."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from find_auto_values(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"


def replace_values(config: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a copy of ``config`` with the values that ``values`` has by path; None removes the key of the path."""
    replaced = {
        key: replace_values(value, values, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else values.get(f"{prefix}{key}", value)
        for key, value in config.items()
    }
    return {key: value for key, value in replaced.items() if value is not None or f"{prefix}{key}" not in values}


def explain_value(path: str, value: Any, reasons: Mapping[str, str]) -> str:
    """Return a sentence that says which value replaced an "auto", and why; ``reasons`` maps some paths to reasons."""
    if path in SIZE_KEYS:
        return f'{path} is "auto": the engine\'s own default, since no number depends on it'
    default = DATA_KEYS[path][1] if path in DATA_KEYS else "the default of the Trainer of transformers"
    reason = reasons.get(path, default)
    return f'{path} is "auto": {json.dumps(value)}, {reason}'
