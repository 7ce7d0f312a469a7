"""Adapt Lightning Fabric over DistributedDataParallel to the Engine protocol: stage 0."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zharness.engines import ddp
from zharness.engines.fabric_engine import FABRIC_OPTIONS, FABRIC_REFUSES, FabricEngine, build_fabric, prepare_model
from zharness.engines.protocol import EngineConfig, Feature, Reduction
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    EngineAdapter,
    do_nothing,
    identity,
    leaf_parameters,
    validate_config,
)
from zharness.errors import EngineContractError

CAPABILITIES = replace(
    ddp.CAPABILITIES,
    refuses={
        **ddp.REFUSES,
        **FABRIC_REFUSES,
        Feature.AUTOCAST: "its precision='bf16-mixed' also converts the model's outputs to float32",
    },
    variants=ddp.VARIANTS,
)
DDP_OPTIONS = {name: meaning for name, meaning in ddp.OPTIONS.items() if name not in AUTOCAST_OPTION}
OPTIONS = {**DDP_OPTIONS, **FABRIC_OPTIONS}


def factory(model: nn.Module, config: EngineConfig) -> FabricEngine:
    """Set ``model`` up with Fabric's DDPStrategy over the default process group. This is a collective.

    Raises ConfigError for an unsupported configuration, and EngineContractError if Fabric sets up something else.
    """
    from lightning_fabric.strategies import DDPStrategy

    validate_config(config, CAPABILITIES, OPTIONS)
    strategy = DDPStrategy(**{name: value for name, value in config.options.items() if name in DDP_OPTIONS})
    fabric = build_fabric(strategy, next(model.parameters()).device)
    prepared = prepare_model(fabric, model)
    require_ddp(prepared._forward_module, fabric.world_size)
    summed = ddp.trainable_parameters(model) if config.reduction is Reduction.SUM else []
    hooks = [parameter.register_hook(ddp.multiply_by_world_size) for parameter in summed]  # type: ignore[no-untyped-call]
    adapter = EngineAdapter(
        forward=prepared.__call__,
        no_sync=lambda: fabric.no_backward_sync(prepared),
        params=leaf_parameters(model),
        full_tensors=identity,
        layout={},
        drop_gradients=do_nothing,
        release=lambda: ddp.remove_hooks(hooks),
    )
    return FabricEngine(model, CAPABILITIES, config, adapter, fabric, prepared)


def require_ddp(wrapped: nn.Module, world_size: int) -> None:
    """Raise EngineContractError unless Fabric set up DDP over all ranks."""
    if isinstance(wrapped, DistributedDataParallel) and world_size == dist.get_world_size():
        return
    raise EngineContractError(
        f"Fabric set up a {type(wrapped).__name__} for {world_size} processes; expected DistributedDataParallel for "
        f"{dist.get_world_size()}"
    )
