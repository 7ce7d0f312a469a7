"""Parse DeepSpeed's JSON into ``Settings``, and refuse each key and value that this engine does not support."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zharness.errors import ConfigError
from zharness.reference.buckets import DEFAULT_BUCKET_SIZE
from zharness.reference.deepspeed_json.schema import parse_flag
from zharness.reference.deepspeed_json.sections import TOP_LEVEL
from zharness.reference.mixed_precision.loss_scale import LossScaleConfig
from zharness.reference.mixed_precision.precision import AutocastConfig, OnOverflow, Precision

SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OPTIM = torch.optim
# These optimizers update each element by itself, so the update of a shard is the shard of the full update.
OPTIMIZERS: dict[str, type[_OPTIM.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(_OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.ASGD, _OPTIM.NAdam),
        *(_OPTIM.RAdam, _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.SGD),
    )
}
# These optimizers need a full parameter, or all parameters. Some releases of torch lack some of these classes.
NOT_ELEMENTWISE = {
    "Adafactor": "it factors a matrix into rows and columns",
    "LBFGS": "it needs inner products over all parameters, and a closure",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it needs sparse gradients",
}
SCHEDULERS = {
    name: getattr(_OPTIM.lr_scheduler, name)
    for name in (
        *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
        *("MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
    )
}


@dataclass(frozen=True)
class ClassChoice:
    """An optimizer or scheduler class that the JSON names, and the keyword arguments to build it with."""

    target_class: Any = torch.optim.AdamW
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The parsed and checked configuration, in which absent keys have their defaults.

    ``max_grad_norm`` is the limit of gradient clipping, or None if gradients are not clipped. ``average_over_ranks``
    selects the mean of the gradients over ranks instead of their sum. Over micro-batches the engine always takes the
    mean. ``shard_size`` is the number of ranks that share one copy of the weights; None means all.
    """

    stage: int
    micro_batch_size: int
    accumulation_steps: int
    max_grad_norm: float | None
    optimizer: ClassChoice | None
    scheduler: ClassChoice | None = None
    precision: Precision = field(default_factory=Precision)
    average_over_ranks: bool = True
    drop_last: bool = False
    allow_untested_optimizer: bool = False
    grad_accum_dtype: torch.dtype | None = None
    bucket_size: int = DEFAULT_BUCKET_SIZE
    prefetch_size: int = DEFAULT_BUCKET_SIZE
    shard_size: int | None = None


def load_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return ``config`` if it is a mapping, otherwise the JSON object in the file whose path is ``config``.

    Raises ConfigError if the file cannot be read.
    """
    if isinstance(config, Mapping):
        return config
    try:
        loaded = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config {str(config)!r} is not a readable JSON file: {error}; pass a dict or a path"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config {str(config)!r} has a {type(loaded).__name__} at the top level; expected a JSON object"
        )
    return loaded


def parse_config(config: Mapping[str, Any], world_size: int, device_type: str = "cpu") -> Settings:
    """Parse the settings for a model on ``device_type``.

    Raises ConfigError for the first unsupported key or value.
    """
    values = TOP_LEVEL("", config)
    zero = values["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        if zero[key]["device"] == "cpu" and device_type != "cpu":
            raise ConfigError(f"zero_optimization.{key}.device is 'cpu' and the model is on {device_type}; use 'none'")
    if world_size % (zero["mics_shard_size"] or 1):
        raise ConfigError(
            f"zero_optimization.mics_shard_size is {zero['mics_shard_size']}, which does not divide {world_size} ranks"
        )
    micro, steps = _parse_batch_sizes(values, world_size)
    precision = _parse_precision(values)
    _check_grad_accum_dtype(values["data_types"]["grad_accum_dtype"], precision, zero["stage"])
    param_dtype, reduce_dtype = precision.param_dtype, precision.reduce_dtype
    if zero["stage"] == 3 and param_dtype is not None and reduce_dtype not in (None, param_dtype):
        raise ConfigError(
            f"communication_data_type is {reduce_dtype}, but the parameters are {param_dtype}; at stage 3 gradients "
            "are reduced in the dtype of the parameters; leave the key out, or use another stage"
        )
    return Settings(
        stage=zero["stage"],
        micro_batch_size=micro,
        accumulation_steps=steps,
        max_grad_norm=values["gradient_clipping"] or None,
        optimizer=_parse_optimizer(values["optimizer"]),
        scheduler=_parse_scheduler(values["scheduler"]),
        precision=precision,
        grad_accum_dtype=values["data_types"]["grad_accum_dtype"],
        average_over_ranks=values["gradient_allreduce_op"] == "mean",
        drop_last=values["dataloader_drop_last"],
        allow_untested_optimizer=values["zero_allow_untested_optimizer"],
        bucket_size=zero["reduce_bucket_size"],
        prefetch_size=zero["stage3_prefetch_bucket_size"],
        shard_size=zero["mics_shard_size"],
    )


def _parse_batch_sizes(values: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Return the micro-batch size and the accumulation steps, computed from the sizes in the configuration.

    If only one size is given, the accumulation steps are 1. Raises ConfigError if the sizes do not fit together.
    """
    train, micro = values["train_batch_size"], values["train_micro_batch_size_per_gpu"]
    steps = values["gradient_accumulation_steps"]
    if train is None and micro is None:
        raise ConfigError("neither train_batch_size nor train_micro_batch_size_per_gpu is given; give one of them")
    if steps is None:
        steps = 1 if train is None or micro is None else max(1, train // (micro * world_size))
    if micro is None:
        micro = max(1, (train or 1) // (steps * world_size))
    expected = micro * steps * world_size
    if train is not None and train != expected:
        raise ConfigError(
            f"train_batch_size is {train}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x world "
            f"size = {micro} x {steps} x {world_size} = {expected}; leave one of the three out"
        )
    return micro, steps


def _parse_precision(values: Mapping[str, Any]) -> Precision:
    """Return the precision that fp16, bf16, torch_autocast and communication_data_type configure.

    Raises ConfigError if two of the sections are enabled.
    """
    enabled = [key for key in ("fp16", "bf16", "torch_autocast") if values[key]["enabled"]]
    if len(enabled) > 1:
        raise ConfigError(f"the sections {' and '.join(enabled)} exclude each other; enable only one of them")
    _check_master_weights(values)
    reduce_dtype = values["communication_data_type"]
    if "fp16" in enabled:
        return _parse_fp16(values["fp16"], reduce_dtype)
    if "bf16" in enabled:
        return _parse_bf16(values["bf16"], reduce_dtype)
    return _parse_autocast(values["torch_autocast"], reduce_dtype) if enabled else Precision(reduce_dtype=reduce_dtype)


def _parse_bf16(section: Mapping[str, Any], reduce_dtype: torch.dtype | None) -> Precision:
    """Return the precision of an enabled ``bf16`` section."""
    return Precision(
        param_dtype=torch.bfloat16,
        master_dtype=torch.bfloat16 if section["bf16_master_weights_and_grads"] else torch.float32,
        reduce_dtype=reduce_dtype,
        on_overflow=OnOverflow.SKIP if section["check_grad_overflow"] else OnOverflow.RAISE,
    )


def _parse_fp16(section: Mapping[str, Any], reduce_dtype: torch.dtype | None) -> Precision:
    """Return the precision of an enabled ``fp16`` section."""
    static_scale = section["loss_scale"]
    scaling = LossScaleConfig(
        initial_scale=static_scale or 2.0 ** section["initial_scale_power"],
        growth_interval=None if static_scale else section["loss_scale_window"],
        hysteresis=section["hysteresis"],
        consecutive_hysteresis=section["consecutive_hysteresis"],
        min_scale=section["min_loss_scale"],
    )
    return Precision(
        param_dtype=torch.float16,
        master_dtype=torch.float16 if section["fp16_master_weights_and_grads"] else torch.float32,
        reduce_dtype=reduce_dtype,
        input_dtype=torch.float16 if section["auto_cast"] else None,
        loss_scaling=scaling,
        on_overflow=OnOverflow.SKIP,
    )


def _parse_autocast(section: Mapping[str, Any], reduce_dtype: torch.dtype | None) -> Precision:
    """Return the precision of an enabled ``torch_autocast`` section. Raises ConfigError for the dtype fp32."""
    dtype = section["dtype"]
    if dtype == torch.float32:
        raise ConfigError(
            "torch_autocast.dtype is fp32, which is not a lower precision; use bf16 or fp16, or disable torch_autocast"
        )
    names = section["lower_precision_safe_modules"]
    safe_modules = SAFE_MODULES if names is None else tuple(map(_import_module_class, names))
    # GradScaler's own defaults: torch_autocast has no keys for them.
    scaling = LossScaleConfig(initial_scale=2.0**16, growth_interval=2000) if dtype == torch.float16 else None
    return Precision(
        reduce_dtype=reduce_dtype,
        autocast=AutocastConfig(dtype, safe_modules),
        loss_scaling=scaling,
        on_overflow=OnOverflow.SKIP if scaling is not None else OnOverflow.RAISE,
    )


def _import_module_class(path: str) -> type[nn.Module]:
    """Import a module class by its full name. Raises ConfigError if the import fails."""
    package, _, name = path.rpartition(".")
    try:
        imported = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names {path!r}, which cannot be imported ({error}); "
            "expected the names of module classes, such as torch.nn.Linear"
        ) from error
    if not (isinstance(imported, type) and issubclass(imported, nn.Module)):
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names {path!r}, which is not a class derived from nn.Module; "
            "expected the names of module classes, such as torch.nn.Linear"
        )
    return imported


def _check_master_weights(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of master weights that DeepSpeed refuses, or that torch.optim does not support.

    torch.optim keeps the optimizer state of a tensor in the dtype of that tensor.
    """
    fp16, bf16, zero = values["fp16"], values["bf16"], values["zero_optimization"]
    fp16_masters, bf16_masters = fp16["fp16_master_weights_and_grads"], bf16["bf16_master_weights_and_grads"]
    if fp16_masters and bf16_masters:
        raise ConfigError(
            "fp16_master_weights_and_grads and bf16_master_weights_and_grads exclude each other; set only one of them"
        )
    if bf16["bf16_optimizer_states"] and not bf16_masters:
        raise ConfigError("bf16_optimizer_states needs bf16_master_weights_and_grads; enable both")
    if bf16_masters and not bf16["bf16_optimizer_states"]:
        raise ConfigError(
            "bf16_master_weights_and_grads without bf16_optimizer_states needs an optimizer with fp32 state for bf16 "
            "weights, which torch.optim does not have (DeepSpeed uses its own CPU optimizer); enable both"
        )
    for name, has_masters, section in (("fp16", fp16_masters, fp16), ("bf16", bf16_masters, bf16)):
        if has_masters and not section["enabled"]:
            raise ConfigError(
                f"{name}_master_weights_and_grads is true, but {name} is not enabled; set {name}.enabled to true"
            )
        if has_masters and zero["stage"] == 0:
            raise ConfigError(f"{name}_master_weights_and_grads needs zero_optimization.stage 1, 2 or 3, but got 0")
    if fp16_masters and zero["offload_optimizer"]["device"] != "cpu":
        raise ConfigError(
            "fp16_master_weights_and_grads needs an offloaded optimizer; "
            "set zero_optimization.offload_optimizer.device to 'cpu'"
        )


def _check_grad_accum_dtype(grad_accum_dtype: torch.dtype | None, precision: Precision, stage: int) -> None:
    """Raise ConfigError unless ``grad_accum_dtype`` is the dtype in which this stage adds up micro-batches.

    Stages 0 and 1 add up unreduced gradients in the parameters' dtype; stages 2 and 3 add up reduced gradients in the
    master weights' dtype.
    """
    accum_dtype = (precision.param_dtype if stage < 2 else precision.master_dtype) or torch.float32
    if grad_accum_dtype not in (None, accum_dtype):
        raise ConfigError(
            f"data_types.grad_accum_dtype is {grad_accum_dtype}, but at stage {stage} this configuration accumulates "
            f"gradients in {accum_dtype}; leave the key out, or use stage 2 or 3 to accumulate in the dtype of the "
            "master weights"
        )


def _parse_optimizer(section: Mapping[str, Any] | None) -> ClassChoice | None:
    """Return the class and arguments of the torch optimizer that the section names, or None without a section.

    Raises ConfigError for an unknown name. As in DeepSpeed, "Adam" decays weights as AdamW does unless ``adam_w_mode``
    is false. The key ``torch_adam``, which selects torch's implementation in DeepSpeed, is ignored, since this engine
    has no other implementation.
    """
    if section is None:
        return None
    kwargs, name = dict(section["params"]), str(section["type"])
    refuse_non_elementwise(name)
    if name.lower() not in OPTIMIZERS:
        allowed = [kind.__name__ for kind in OPTIMIZERS.values()]
        raise ConfigError.unknown_name("optimizer.type", name, allowed, "or pass a callable as optimizer=")
    kind = OPTIMIZERS[name.lower()]
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        kwargs.pop("torch_adam", None)
        decoupled = parse_flag("optimizer.params.adam_w_mode", kwargs.pop("adam_w_mode", True))
        kind = torch.optim.AdamW if decoupled else kind
    return ClassChoice(kind, kwargs)


def refuse_non_elementwise(name: str) -> None:
    """Raise ConfigError for a torch optimizer that cannot update each shard of a parameter separately."""
    for known, reason in NOT_ELEMENTWISE.items():
        if name.lower() == known.lower():
            raise ConfigError(
                f"optimizer {known} cannot work on shards: {reason}; use an elementwise one, such as AdamW"
            )


def _parse_scheduler(section: Mapping[str, Any] | None) -> ClassChoice | None:
    """Return the class and arguments of the torch scheduler that the section names, or None without a section.

    Raises ConfigError for an unknown name.
    """
    if section is None:
        return None
    name = section["type"]
    if name not in SCHEDULERS:
        raise ConfigError.unknown_name("scheduler.type", name, SCHEDULERS, "or pass a callable as lr_scheduler=")
    return ClassChoice(SCHEDULERS[name], section["params"])


def iter_ignored_keys() -> Iterator[str]:
    """Yield the paths of all keys that are accepted but ignored, because they cannot change a result."""
    return TOP_LEVEL.iter_ignored_keys()
