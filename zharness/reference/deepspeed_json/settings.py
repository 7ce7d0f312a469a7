"""DeepSpeed's JSON as this engine reads it: complete, consistent, and refused by name where it cannot be honoured."""

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
# Each works element by element, so a shard's update is the shard of the whole's update.
OPTIMIZERS: dict[str, type[_OPTIM.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(_OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.ASGD, _OPTIM.NAdam),
        *(_OPTIM.RAdam, _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.SGD),
    )
}
# These look at a whole parameter, or at all of them; a release of torch that lacks one lacks it here too.
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
    """A class of torch by its name in the JSON, and its keyword arguments."""

    target_class: Any = torch.optim.AdamW
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The configuration, complete and consistent. ``clip`` is None where the norm is not limited.

    ``average`` tells the mean over ranks from the sum; the mean over micro-batches is taken either way.
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


def load_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """``config`` itself, or the JSON object in the file of that name. Raises ConfigError for no or another file."""
    if isinstance(config, Mapping):
        return config
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {str(config)!r} is no readable JSON file: {error}; pass a dict or a path") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config {str(config)!r} holds a {type(found).__name__}; expected one JSON object")
    return found


def parse_config(config: Mapping[str, Any], world_size: int, device_type: str = "cpu") -> Settings:
    """The settings in ``config`` for a model on ``device``. Raises ConfigError, by name, for what is not honoured."""
    got = TOP_LEVEL("", config)
    zero = got["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        if zero[key]["device"] == "cpu" and device_type != "cpu":
            raise ConfigError(f"zero_optimization.{key}.device is 'cpu' and the model is on {device_type}; use 'none'")
    micro, steps = _parse_batch_sizes(got, world_size)
    precision = _parse_precision(got)
    _check_grad_accum_dtype(got["data_types"]["grad_accum_dtype"], precision, zero["stage"])
    held, wire = precision.param_dtype, precision.reduce_dtype
    if zero["stage"] == 3 and held is not None and wire not in (None, held):
        raise ConfigError(
            f"communication_data_type is {wire} and the parameters are {held}: at stage 3 a gradient arrives in the "
            "parameters' dtype, so no other wire keeps its promise; leave the key out, or use another stage"
        )
    return Settings(
        stage=zero["stage"],
        micro_batch_size=micro,
        accumulation_steps=steps,
        max_grad_norm=got["gradient_clipping"] or None,
        optimizer=_parse_optimizer(got["optimizer"]),
        scheduler=_parse_scheduler(got["scheduler"]),
        precision=precision,
        grad_accum_dtype=got["data_types"]["grad_accum_dtype"],
        average_over_ranks=got["gradient_allreduce_op"] == "mean",
        drop_last=got["dataloader_drop_last"],
        allow_untested_optimizer=got["zero_allow_untested_optimizer"],
        bucket_size=zero["reduce_bucket_size"],
        prefetch_size=zero["stage3_prefetch_bucket_size"],
    )


def _parse_batch_sizes(values: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Micro-batch size and accumulation steps, from any two of DeepSpeed's three sizes (or one and a default of 1)."""
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
    on = [key for key in ("fp16", "bf16", "torch_autocast") if values[key]["enabled"]]
    if len(on) > 1:
        raise ConfigError(f"the sections {' and '.join(on)} exclude each other; enable one of them")
    _check_master_weights(values)
    wire = values["communication_data_type"]
    if "fp16" in on:
        return _parse_fp16(values["fp16"], wire)
    if "bf16" in on:
        low, skip = values["bf16"]["bf16_master_weights_and_grads"], values["bf16"]["check_grad_overflow"]
        master = torch.bfloat16 if low else torch.float32
        policy = OnOverflow.SKIP if skip else OnOverflow.RAISE
        return Precision(param_dtype=torch.bfloat16, master_dtype=master, reduce_dtype=wire, on_overflow=policy)
    return _parse_autocast(values["torch_autocast"], wire) if on else Precision(reduce_dtype=wire)


def _parse_fp16(section: Mapping[str, Any], reduce_dtype: torch.dtype | None) -> Precision:
    static = section["loss_scale"]
    scaling = LossScaleConfig(
        initial_scale=static or 2.0 ** section["initial_scale_power"],
        growth_interval=None if static else section["loss_scale_window"],
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
    low = section["dtype"]
    if low == torch.float32:
        raise ConfigError("torch_autocast.dtype is fp32, which is no lower precision; use bf16 or fp16, or disable it")
    named = section["lower_precision_safe_modules"]
    safe = SAFE_MODULES if named is None else tuple(map(_import_module_class, named))
    # GradScaler's own defaults: torch_autocast has no keys for them.
    scaling = LossScaleConfig(initial_scale=2.0**16, growth_interval=2000) if low == torch.float16 else None
    policy = OnOverflow.SKIP if scaling is not None else OnOverflow.RAISE
    return Precision(
        reduce_dtype=reduce_dtype, autocast=AutocastConfig(low, safe), loss_scaling=scaling, on_overflow=policy
    )


def _import_module_class(path: str) -> type[nn.Module]:
    package, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"torch_autocast.lower_precision_safe_modules: {path!r} does not import: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"torch_autocast.lower_precision_safe_modules: {path!r} is no class of modules")
    return found


def _check_master_weights(values: Mapping[str, Any]) -> None:
    """DeepSpeed's rules for masters, and torch.optim's: it keeps state in the dtype of what it updates."""
    fp16, bf16, zero = values["fp16"], values["bf16"], values["zero_optimization"]
    low16, low = fp16["fp16_master_weights_and_grads"], bf16["bf16_master_weights_and_grads"]
    if low16 and low:
        raise ConfigError("fp16_master_weights_and_grads and bf16_master_weights_and_grads exclude each other")
    if bf16["bf16_optimizer_states"] and not low:
        raise ConfigError("bf16_optimizer_states needs bf16_master_weights_and_grads; enable both")
    if low and not bf16["bf16_optimizer_states"]:
        raise ConfigError(
            "bf16_master_weights_and_grads without bf16_optimizer_states asks for fp32 state of bf16 weights, for "
            "which DeepSpeed needs its own offloaded CPU optimizer and torch.optim has none; enable both"
        )
    for name, master, section in (("fp16", low16, fp16), ("bf16", low, bf16)):
        if master and not section["enabled"]:
            raise ConfigError(f"{name}_master_weights_and_grads is set and the section {name} is not enabled")
        if master and zero["stage"] == 0:
            raise ConfigError(f"{name}_master_weights_and_grads needs zero_optimization.stage 1, 2 or 3, got 0")
    if low16 and zero["offload_optimizer"]["device"] != "cpu":
        raise ConfigError("fp16_master_weights_and_grads needs zero_optimization.offload_optimizer.device 'cpu'")


def _check_grad_accum_dtype(grad_accum_dtype: torch.dtype | None, precision: Precision, stage: int) -> None:
    """Gradients add up as backward makes them (stages 0 and 1), or once they are reduced, as masters (2 and 3)."""
    done = (precision.param_dtype if stage < 2 else precision.master_dtype) or torch.float32
    if grad_accum_dtype not in (None, done):
        raise ConfigError(
            f"data_types.grad_accum_dtype is {grad_accum_dtype}; at stage {stage} micro-batches add up in {done} under "
            "this configuration; leave the key out, or use stage 2 or 3 to add up in the masters' dtype"
        )


def _parse_optimizer(section: Mapping[str, Any] | None) -> ClassChoice | None:
    """torch's optimizers by DeepSpeed's names for them.

    Its "Adam" decays weights as AdamW does unless ``adam_w_mode`` is false, and so does this one; ``torch_adam`` asks
    DeepSpeed for torch's implementation, which is the only one here.
    """
    if section is None:
        return None
    args, name = dict(section["params"]), str(section["type"])
    refuse_non_elementwise(name)
    if name.lower() not in OPTIMIZERS:
        allowed = [kind.__name__ for kind in OPTIMIZERS.values()]
        raise ConfigError.unknown_name("optimizer.type", name, allowed, "or pass optimizer= a callable")
    kind = OPTIMIZERS[name.lower()]
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        args.pop("torch_adam", None)
        decoupled = parse_flag("optimizer.params.adam_w_mode", args.pop("adam_w_mode", True))
        kind = torch.optim.AdamW if decoupled else kind
    return ClassChoice(kind, args)


def refuse_non_elementwise(name: str) -> None:
    """Raises ConfigError for an optimizer of torch whose update of a shard is not the shard of its update."""
    for known, reason in NOT_ELEMENTWISE.items():
        if name.lower() == known.lower():
            raise ConfigError(f"optimizer {known} cannot work on shards: {reason}; use an elementwise one, as AdamW is")


def _parse_scheduler(section: Mapping[str, Any] | None) -> ClassChoice | None:
    if section is None:
        return None
    name = section["type"]
    if name not in SCHEDULERS:
        raise ConfigError.unknown_name("scheduler.type", name, SCHEDULERS, "or pass lr_scheduler= a callable")
    return ClassChoice(SCHEDULERS[name], section["params"])


def iter_ignored_keys() -> Iterator[str]:
    """Every key that is accepted because it cannot change a number, with its section."""
    return TOP_LEVEL.iter_ignored_keys()
