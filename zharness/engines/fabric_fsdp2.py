"""Adapt Lightning Fabric's ModelParallelStrategy to the Engine protocol: ``fully_shard``, and tensor parallelism.

The strategy makes a mesh of data and tensor parallelism, and calls a function of the user that shards the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn

from zharness.engines import fsdp2, fsdp2_options
from zharness.engines.fabric_engine import (
    DOCUMENTATION,
    FABRIC_OPTIONS,
    FABRIC_REFUSES,
    FabricEngine,
    build_fabric,
    prepare_model,
)
from zharness.engines.fsdp2_options import (
    GROUPS_REMAIN,
    OPTIONS_AT_EVERY_STAGE,
    apply_options,
    require_method,
    reshard_after_forward,
)
from zharness.engines.fsdp_groups import GROUPING_OPTIONS
from zharness.engines.protocol import Capabilities, EngineConfig, Feature
from zharness.engines.tensor_parallel import apply_plan, find_owners
from zharness.engines.torch_engine import EngineAdapter, call_each, do_nothing, leaf_parameters, validate_config
from zharness.engines.torch_gathers import gather_full_tensors
from zharness.errors import EngineContractError
from zharness.mesh import TENSOR

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

REFUSES = {
    **fsdp2.REFUSES,
    **FABRIC_REFUSES,
    Feature.AUTOCAST: "its precision='bf16-mixed' also converts the model's outputs to float32",
    Feature.DEFERRED: (
        "it materializes a model on the meta device by reset_parameters of each rank, which are not the same weights "
        f"({DOCUMENTATION})"
    ),
    Feature.RESOURCES: "it does not count the bytes that it allocates",
    **GROUPS_REMAIN,
}
_KEYS = (*GROUPING_OPTIONS, "reset_iter_state", "reduce_scatter_unused_params")
OPTIONS = {**{name: fsdp2_options.OPTIONS[name] for name in _KEYS}, **FABRIC_OPTIONS}
CAPABILITIES = replace(
    fsdp2.CAPABILITIES,
    dtypes=frozenset({"fp32"}),
    refuses=REFUSES,
    variants={name: OPTIONS_AT_EVERY_STAGE[name] for name in ("one_group", "iteration_reset", "zeros_for_unused")},
    mesh_axes=frozenset({TENSOR}),
)


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that Fabric over FSDP2 refuses at ``stage``."""
    return CAPABILITIES if stage == 3 else replace(CAPABILITIES, refuses={**REFUSES, **fsdp2.STAGE_2_REFUSES})


def factory(model: nn.Module, config: EngineConfig) -> FabricEngine:
    """Set ``model`` up with Fabric's ModelParallelStrategy over the default process group. This is a collective.

    Raises ConfigError for an unsupported configuration, and EngineContractError if Fabric sets up something else.
    """
    from lightning_fabric.strategies import ModelParallelStrategy

    validate_config(config, CAPABILITIES, OPTIONS)
    tensor_size = config.mesh.size(TENSOR)
    strategy = ModelParallelStrategy(
        parallelize_fn=make_parallelize(config),
        data_parallel_size=dist.get_world_size() // tensor_size,
        tensor_parallel_size=tensor_size,
    )
    fabric = build_fabric(strategy, next(model.parameters()).device)
    prepared = prepare_model(fabric, model)
    require_fully_sharded(model, fabric.world_size)
    sharded = [cast("FSDPModule", module) for module in model.modules() if fsdp2.is_sharded(module)]
    apply_options(sharded, config)
    sync = FabricSync(model, sharded, config, lambda: fabric.no_backward_sync(prepared))
    params = leaf_parameters(model)
    reset = require_method("reset_iter_state", model) if config.options.get("reset_iter_state") else do_nothing
    adapter = EngineAdapter(
        forward=prepared.__call__,
        no_sync=sync.disable,
        params=params,
        full_tensors=gather_full_tensors,
        layout=find_owners(params),
        drop_gradients=lambda: call_each(reset, sync.drop_unreduced_gradients),
        release=lambda: fsdp2.reshard(sharded),
    )
    capabilities = fsdp2.refuse_no_gradient(capabilities_at(config.stage), config.options)
    return FabricEngine(model, capabilities, config, adapter, fabric, prepared)


class FabricSync(fsdp2.GradientSync):
    """Leaves gradients unreduced inside Fabric's own context ``no_backward_sync``."""

    def __init__(
        self,
        model: nn.Module,
        sharded: list[FSDPModule],
        config: EngineConfig,
        no_backward_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(model, sharded, config)
        self._no_backward_sync = no_backward_sync

    @contextmanager
    def disable(self) -> Iterator[None]:
        self._unreduced_count += 1
        with self._no_backward_sync():
            yield


def make_parallelize(config: EngineConfig) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Return the function that shards a model over the mesh that Fabric makes, as Fabric's tutorials do."""

    def parallelize(model: nn.Module, devices: DeviceMesh) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        if TENSOR in config.mesh.axes:
            apply_plan(model, config, devices["tensor_parallel"])
        for module in fsdp2.fully_sharded_modules(model, config.options):
            fully_shard(module, mesh=devices["data_parallel"], reshard_after_forward=reshard_after_forward(config))
        return model

    return parallelize


def require_fully_sharded(model: nn.Module, world_size: int) -> None:
    """Raise EngineContractError unless Fabric sharded the model with FSDP2, over all ranks."""
    if fsdp2.is_sharded(model) and world_size == dist.get_world_size():
        return
    raise EngineContractError(
        f"Fabric set up a {type(model).__name__} for {world_size} processes; expected an FSDPModule for "
        f"{dist.get_world_size()}"
    )
