"""Stand in for ``deepspeed.initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zharness.compat.deepspeed_engine.communication import init_distributed
from zharness.compat.deepspeed_engine.configuration import EngineConfig, translate_config
from zharness.compat.deepspeed_engine.engine import DeepSpeedEngine, release_engine
from zharness.compat.deepspeed_engine.leaf_modules import (
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from zharness.compat.deepspeed_engine.parameters import unshard_model
from zharness.compat.deepspeed_engine.refusals import AssertionUsageError, require
from zharness.compat.deepspeed_engine.unsupported import PipelineModule
from zharness.errors import ConfigError
from zharness.reference.initialize import initialize as initialize_reference


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Build the reference engine from DeepSpeed's arguments; return engine, optimizer, loader and schedule.

    This is a collective. With bf16 or fp16 the whole model is cast first, as DeepSpeed does, so master weights start
    from the rounded weights, and frozen parameters and buffers are cast too. Raises AssertionError for arguments that
    DeepSpeed asserts, and ConfigError for what the reference engine does not support.
    """
    if model is None:
        raise AssertionUsageError("deepspeed.initialize requires a model")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu and mesh_param are not supported: the reference engine has data parallelism only")
    translated = translate_config(_choose_config(args, config, config_params))
    _check_pipeline(model, translated)
    if dist_init_required is not False:
        init_distributed()
    release_engine(model)
    _mark_leaf_modules(model, translated.leaf_modules)
    unshard_model(model)
    if translated.half_dtype is not None:
        model.to(translated.half_dtype)
    parameters = None if model_parameters is None else _as_groups(model_parameters)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()) if parameters is None else parameters)
    _check_tested(optimizer, translated)
    if optimizer is None and "optimizer" not in translated.reference_json:
        optimizer = _build_idle_optimizer
    engine, _, loader, schedule = initialize_reference(
        model=model,
        config=translated.reference_json,
        model_parameters=parameters if optimizer is None else None,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
    )
    stand_in = DeepSpeedEngine(engine, translated, schedule, loader)
    return stand_in, stand_in.optimizer, loader, schedule


def _mark_leaf_modules(model: nn.Module, configured: Mapping[str, Sequence[str]]) -> None:
    """Mark the leaf modules that the JSON names; as in DeepSpeed, names that match none are ignored."""
    set_z3_leaf_modules(model, configured.get("classes", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, configured.get("names", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, configured.get("name_suffixes", ()), raise_if_not_found=False)


def _build_idle_optimizer(leaves: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer whose steps change nothing, for an engine that only runs forwards and backwards."""
    return torch.optim.SGD(list(leaves.values()), lr=0.0)


def _choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration, which is in one of three arguments."""
    chosen = config if config is not None else config_params
    path = getattr(args, "deepspeed_config", None)
    if path is not None:
        require(
            chosen is None,
            "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and "
            "deepspeed.initialize() function call",
        )
        chosen = path
    require(chosen is not None, "DeepSpeed requires --deepspeed_config to specify configuration file")
    return chosen


def _check_pipeline(model: nn.Module, config: EngineConfig) -> None:
    """Refuse a pipeline: AssertionError where DeepSpeed refuses one too, else ConfigError."""
    if isinstance(model, PipelineModule):
        require(config.is_managed, "managed_gradient_accumulation=False is not supported with pipeline parallelism")
        raise ConfigError("the reference engine has no pipeline parallelism")


def _check_tested(optimizer: Any, config: EngineConfig) -> None:
    """Raise AssertionError for an optimizer that is not torch's, unless stage 0 or the JSON allows it, as DeepSpeed."""
    is_tested = optimizer is None or type(optimizer).__module__.startswith("torch.optim")
    require(
        is_tested or config.stage == 0 or config.reference_json.get("zero_allow_untested_optimizer"),
        'You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true> in the '
        "configuration file to use it.",
    )


def _as_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Return the trained parameters, or groups with the trained parameters, of which the optimizer is built."""
    entries = list(model_parameters)
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": _trained(group["params"])} for group in entries]
    return _trained(entries)


def split_moe_groups(param_groups: Any, max_group_size: float = 0) -> list[dict[str, Any]]:
    """Return the groups of a model without experts as they are, in a list; ``max_group_size`` is for experts only.

    Raises ConfigError for a Parameter of an expert, which DeepSpeed marks by ``allreduce = False``.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(not getattr(parameter, "allreduce", True) for group in groups for parameter in group["params"]):
        raise ConfigError("the reference engine has no mixture of experts")
    return groups


def _trained(parameters: Any) -> list[Any]:
    """Return those of ``parameters`` that require a gradient."""
    entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [parameter for parameter in entries if parameter.requires_grad]


def add_config_arguments(parser: Any) -> Any:
    """Add DeepSpeed's options to an argparse parser, and return the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser
