"""Adapt ``torch.distributed.optim.ZeroRedundancyOptimizer`` over DDP to the Engine protocol: stage 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import ddp, optimizers
from zharness.engines.protocol import EngineConfig, Feature, OptimizerSpec
from zharness.engines.torch_engine import TorchEngine, validate_config, without_refusal

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# DDP reduces gradients, which are whole on every rank. Each parameter's optimizer state is on one rank; this rank
# updates the parameter and broadcasts it.
REFUSED_FEATURES = {
    **ddp.REFUSES,
    Feature.WRITE_IN: (
        "one rank has the optimizer state of a parameter, and only load_state_dict replaces it "
        "(https://docs.pytorch.org/docs/stable/distributed.optim.html)"
    ),
    Feature.RESOURCES: (
        "ranks own different amounts: 'Each parameter belongs to a single rank and is not divided among ranks' "
        "(https://docs.pytorch.org/docs/stable/distributed.optim.html)"
    ),
}
CAPABILITIES = replace(
    ddp.CAPABILITIES,
    stages=frozenset({1}),
    refuses=without_refusal(Feature.AUTOCAST_SCALER, REFUSED_FEATURES),
    variants=ddp.VARIANTS,
)


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Wrap ``model`` in DDP with a ZeroRedundancyOptimizer over the default process group. This is a collective.

    ``config.options`` are passed to DDP. Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, ddp.OPTIONS)
    return TorchEngine(
        model,
        CAPABILITIES,
        config,
        replace(
            ddp.wrap_in_ddp(model, config),
            build_optimizer=build_sharded_optimizer,
            optimizer_states=collect_optimizer_states,
        ),
    )


def build_sharded_optimizer(params: Mapping[str, Tensor], spec: OptimizerSpec) -> ZeroRedundancyOptimizer:
    """Build the ZeroRedundancyOptimizer of ``spec``. Raises UsageError for an unknown optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = optimizers.param_groups(params, spec)
    return ZeroRedundancyOptimizer(groups, optimizers.optimizer_class(spec.name), **spec.args)


def collect_optimizer_states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the full optimizer state by parameter name, consolidated from all ranks. This is a collective."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert isinstance(optimizer, ZeroRedundancyOptimizer), "build_sharded_optimizer builds this class"
    states: dict[int, Mapping[str, Any]] = {}
    for rank in range(dist.get_world_size()):
        # Consolidating to the next rank drops this rank's copy, so read the copy now.
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            states = optimizer.state_dict()["state"]
    order = [param for group in optimizer.param_groups for param in group["params"]]
    indices = {id(param): index for index, param in enumerate(order)}
    return {name: states.get(indices[id(param)]) or {} for name, param in params.items()}
