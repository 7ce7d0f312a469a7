"""Build DeepSpeed engines with options of the adapter: other optimizers, leaf modules and universal checkpoints."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import optimizers
from zharness.engines.deepspeed_experts import split_groups
from zharness.engines.deepspeed_options import (
    CPU_ADAM,
    DEEPSPEED_OPTIONS,
    FUSED_ADAM,
    JSON_OPTIMIZER,
    JSON_SCHEDULER,
    LEAF_MODULES,
    OFFLOAD_STATES,
    TENSOR_RATES,
    UNIVERSAL_CHECKPOINT,
    UNSCALED_BACKWARD,
    UNWRAPPED,
    ZERO_INIT,
)
from zharness.engines.deepspeed_schedulers import json_scheduler
from zharness.engines.gpu_options import NO_GPU
from zharness.engines.options import merge_options
from zharness.engines.protocol import EngineConfig, OptimizerSpec
from zharness.errors import ConfigError, EngineContractError
from zharness.mesh import EXPERT

# Run everything between two steps in one ``coalesce_grad_reduction()`` block. If a step has several backwards,
# DeepSpeed documents that only 'the final forward/backward should have the boundary state set to True'
# (set_gradient_accumulation_boundary). An adapter cannot know which backward is the final one. Inside the block it does
# not matter: 'every backward inside leaves grads locally on params', and the end of the block reduces them.
COALESCE = "coalesce_grad_reduction"
# The number of backwards that end without an exception before a step. The last of them is the final one. Stage 0 and
# BF16_Optimizer have no ``coalesce_grad_reduction()`` block.
BACKWARDS_PER_STEP = "backwards_per_step"
ADAPTER_OPTIONS = (
    BACKWARDS_PER_STEP,
    COALESCE,
    CPU_ADAM,
    FUSED_ADAM,
    JSON_OPTIMIZER,
    JSON_SCHEDULER,
    LEAF_MODULES,
    OFFLOAD_STATES,
    TENSOR_RATES,
    UNIVERSAL_CHECKPOINT,
    UNSCALED_BACKWARD,
    UNWRAPPED,
    ZERO_INIT,
)

MUON = "muon"  # the name of the optimizer in an OptimizerSpec
_UNIVERSAL_TAG = "universal"
_LATEST_UNIVERSAL = "latest_universal"  # the file in which load_checkpoint looks for the tag of a universal checkpoint
_ADAM_KINDS = {CPU_ADAM: "DeepSpeedCPUAdam", FUSED_ADAM: "FusedAdam"}
_ADAMW_ARGUMENTS = {"DeepSpeedCPUAdam": "adamw_mode", "FusedAdam": "adam_w_mode"}
# The arguments of torch.optim that DeepSpeedCPUAdam and FusedAdam also have, with torch's defaults where DeepSpeed's
# differ.
_ADAM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"adam": {}, "adamw": {"weight_decay": 1e-2}}
_ADAM_ARGUMENTS = {"lr", "betas", "eps", "weight_decay"}


def json_overrides(config: EngineConfig) -> dict[str, Any]:
    """Return the JSON that ``config.options`` add: keys of DeepSpeed, and the JSON for options of the adapter."""
    options = config.options
    overrides = {key: value for key, value in options.items() if key not in ADAPTER_OPTIONS}
    if takes_optimizer_from_json(config):
        overrides = merge_options(overrides, {"optimizer": json_optimizer(config.optimizer)})
    if config.optimizer.name == MUON and config.stage == 3:
        # 'Muon and reduce scatter cannot be used together' (stage3.py)
        overrides = merge_options(overrides, {"zero_optimization": {"reduce_scatter": False}})
    if options.get(UNIVERSAL_CHECKPOINT):
        overrides = merge_options(overrides, {"checkpoint": {"load_universal": True}})
    zero = overrides.get("zero_optimization", {})
    if zero.get("zero_hpz_partition_size", 1) > 1:
        size, world_size = zero["zero_hpz_partition_size"], dist.get_world_size()
        # DeepSpeed asserts that the size divides the world size. If it does not, use the world size itself.
        fitting = size if world_size % size == 0 else world_size
        overrides = merge_options(overrides, {"zero_optimization": {"zero_hpz_partition_size": fitting}})
    return overrides


def takes_optimizer_from_json(config: EngineConfig) -> bool:
    """Return whether DeepSpeed builds the optimizer: if the option is set, or for Muon, which torch cannot shard."""
    return bool(config.options.get(JSON_OPTIMIZER)) or config.optimizer.name == MUON


def run_muon_eagerly(config: EngineConfig) -> AbstractContextManager[Any]:
    """Return a context in which torch.compile compiles nothing, if the optimizer is Muon.

    DeepSpeed compiles Muon's functions. On each rank the compilation would take a minute, and the compiled kernels
    would round differently.
    """
    return torch.compiler.set_stance("force_eager") if config.optimizer.name == MUON else nullcontext()


def json_optimizer(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the section ``optimizer`` with which DeepSpeed builds the torch.optim optimizer of ``spec``.

    ``torch_adam`` selects torch's Adam. ``adam_w_mode`` is always set, because DeepSpeed's type Adam is AdamW by
    default.
    """
    params = dict(spec.args)
    if spec.name in ("adam", "adamw"):
        params |= {"torch_adam": True, "adam_w_mode": spec.name == "adamw"}
    if spec.name == MUON:
        params |= {"torch_adam": True, "ns_method": "standard"}
    return {"type": optimizers.optimizer_class(spec.name).__name__, "params": params}


def require_buildable(stage: int, options: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the reason, for options that this machine cannot build at ``stage``.

    An option that zharness leaves out on a CPU because it changes nothing there can still be built.
    """
    for name, entry in DEEPSPEED_OPTIONS.items():
        absent = entry.option.absent
        if absent not in ("", NO_GPU) and stage in entry.stages and _contains(options, entry.option.options):
            raise ConfigError(f"got {name}, which cannot be built: {absent}")


def initialize(
    deepspeed: Any,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    config: EngineConfig,
    ds_config: Mapping[str, Any],
    mpu: Any = None,
) -> tuple[Any, Sequence[Tensor]]:
    """Build ``deepspeed.initialize``'s engine for ``model``, with the optimizer and schedule of ``config``.

    ``parameters`` are the model's parameters by name, including frozen parameters, because the caller may unfreeze
    them. ``mpu`` has the groups of sequence parallelism, or is None. Returns the engine and, by parameter group, the
    tensors that the caller gave as learning rates (none unless the option ``TENSOR_RATES`` is set).
    """
    if config.options.get(LEAF_MODULES) and (classes := leaf_classes(model)):  # DeepSpeed refuses an empty list
        deepspeed.utils.set_z3_leaf_modules(model, classes)
    if config.options.get(ZERO_INIT):
        # Users build models inside this block. While it is active, it also replaces the constructors of all modules.
        with deepspeed.zero.Init(module=model, config_dict_or_path=ds_config):
            pass
    groups = optimizers.param_groups(parameters, config.optimizer)
    scheduling: dict[str, Any] = {}
    if config.options.get(JSON_SCHEDULER):
        ds_config = merge_options(ds_config, json_scheduler(config.optimizer, groups))
    else:
        scheduling["lr_scheduler"] = partial(optimizers.schedule, spec=config.optimizer)
    if takes_optimizer_from_json(config):
        # Releases before 0.19.6 take plain parameters for Muon, and no parameter groups.
        is_plain = config.optimizer.name == MUON and not config.optimizer.groups
        is_split = EXPERT in config.mesh.axes
        given = list(parameters.values()) if is_plain and not is_split else group_parameters(parameters, config)
        return deepspeed.initialize(model=model, model_parameters=given, config=ds_config, mpu=mpu, **scheduling)[0], ()
    optimizer = build_optimizer(parameters, config)
    rates = []
    if config.options.get(TENSOR_RATES):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            rates.append(group["lr"])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, mpu=mpu, **scheduling)[0], rates


def require_given_rates(optimizer: Any, rates: Sequence[Tensor]) -> None:
    """Raise EngineContractError unless the learning rates of ``optimizer`` still are the tensors ``rates``.

    torch's schedulers write into these tensors, so the caller's tensors have to stay the learning rates. If ``rates``
    is empty, nothing is checked.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if group["lr"] is not rate:
            raise EngineContractError(f"the schedule replaced the tensor of a learning rate, {rate}, by {group['lr']}")


def require_sharding_optimizer(optimizer: Any, stage: int) -> None:
    """Raise EngineContractError if DeepSpeed chose an optimizer that shards nothing, although ``stage`` shards."""
    if stage and not isinstance(optimizer, importlib.import_module("deepspeed.runtime.base_optimizer").ZeROOptimizer):
        raise EngineContractError(f"DeepSpeed built {type(optimizer).__name__} at stage {stage}, which shards nothing")


def group_parameters(params: Mapping[str, Tensor], config: EngineConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer, with experts in separate groups if ep splits them."""
    groups = optimizers.param_groups(params, config.optimizer)
    return split_groups(groups) if EXPERT in config.mesh.axes else groups


def build_optimizer(params: Mapping[str, Tensor], config: EngineConfig) -> Any:
    """Build torch's optimizer, or DeepSpeedCPUAdam if the option is set and it has all arguments of the optimizer."""
    spec = config.optimizer
    arguments = set(spec.args).union(*(group.overrides for group in spec.groups))
    if EXPERT in config.mesh.axes:
        return optimizers.optimizer_class(spec.name)(group_parameters(params, config), **spec.args)
    kind = next((name for option, name in _ADAM_KINDS.items() if config.options.get(option)), "")
    if not kind or spec.name not in _ADAM_DEFAULTS or arguments - _ADAM_ARGUMENTS:
        return optimizers.build(params, spec)
    mode = {_ADAMW_ARGUMENTS[kind]: spec.name == "adamw"}
    groups, values = optimizers.param_groups(params, spec), {**_ADAM_DEFAULTS[spec.name], **spec.args}
    own_adam: Any = getattr(importlib.import_module("deepspeed.ops.adam"), kind)
    return own_adam(groups, **mode, **values)


def offload_and_reload(engine: Any, stage: int) -> None:
    """Move the states of ``engine`` away and back, which must not change a number.

    Stage 3 moves master weights and optimizer state only with DeepSpeed's FusedAdam, so they are not moved at stage 3.
    """
    kinds: Any = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    moved = [kinds.lp_params, kinds.lp_grads, kinds.contiguous_grad_buffer] if stage == 3 else None
    engine.offload_states(include=moved, pin_memory=False)
    engine.reload_states()


def unwrap_and_wrap(engine: Any) -> None:
    """Remove the hooks of ``engine`` at stage 3 and register them again, as ``unwrap_model_for_generation`` does."""
    stage_3: Any = importlib.import_module("deepspeed.runtime.zero")
    with stage_3.unwrap_model_for_generation(engine):
        pass


def leaf_classes(model: nn.Module) -> Sequence[type[nn.Module]]:
    """Return the classes of the modules inside ``model`` that have children and a forward of their own.

    The result is empty for a model without such modules.
    """
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    inner = (
        type(module)
        for module in model.modules()
        if module is not model and any(module.children()) and not isinstance(module, containers)
    )
    return tuple(dict.fromkeys(inner))


def save_universal(engine: Any, path: Path) -> None:
    """Save a checkpoint below ``path`` and convert it with ds_to_universal. This is a collective.

    Raises EngineContractError on every rank if the conversion fails on rank 0.
    """
    engine.save_checkpoint(str(path), tag="saved")
    errors: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            convert_to_universal(path / "saved", path / _UNIVERSAL_TAG)
            (path / _LATEST_UNIVERSAL).write_text(_UNIVERSAL_TAG, encoding="utf-8")
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            errors = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise EngineContractError(f"ds_to_universal of a checkpoint of this engine raised {errors[0]}")


def convert_to_universal(source: Path, target: Path) -> None:
    """Convert the checkpoint in ``source`` into a universal one in ``target``, in this process."""
    converter: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    converter.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # only Megatron's checkpoints have the section that the conversion expects
        )
    )


def _contains(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether ``options`` set every key of ``wanted`` to the same value, in nested sections too."""
    return all(
        _contains(options[key], value)
        if isinstance(value, Mapping) and isinstance(options.get(key), Mapping)
        else options.get(key) == value
        for key, value in wanted.items()
    )
