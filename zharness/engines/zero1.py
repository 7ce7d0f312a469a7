"""``torch.distributed.optim.ZeroRedundancyOptimizer`` over DDP behind the Engine protocol: stage 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import ddp, optimizers
from zharness.engines.protocol import Capabilities, EngineConfig, Feature, OptimizerSpec
from zharness.engines.torch_engine import TorchEngine, validate_config

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# Gradients are DDP's, whole on every rank; each parameter's optimizer state lives on one rank, which updates the
# parameter and broadcasts it.
REFUSES = {
    **ddp.REFUSES,
    Feature.RESOURCES: (
        "its shares are of uneven size: 'Each parameter belongs to a single rank and is not divided among ranks' "
        "(https://docs.pytorch.org/docs/stable/distributed.optim.html)"
    ),
}
CAPABILITIES = Capabilities(
    stages=frozenset({1}), refuses=REFUSES, variants=ddp.VARIANTS, scaled_sum=ddp.SCALED_SUM_REASON
)


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """DDP around ``model`` with a sharded optimizer, over the default group. Collective.

    ``config.options`` are DDP's. Raises ConfigError for a configuration that DDP or the optimizer does not honour.
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
    """The sharded form of the optimizer that ``spec`` describes. Raises UsageError for an unknown name."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = optimizers.param_groups(params, spec)
    return ZeroRedundancyOptimizer(groups, optimizers.optimizer_class(spec.name), **spec.args)


def collect_optimizer_states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """State by parameter, from all ranks, by the optimizer's own consolidation. Collective."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert isinstance(optimizer, ZeroRedundancyOptimizer), "made by build"
    found: dict[int, Mapping[str, Any]] = {}
    for rank in range(dist.get_world_size()):
        # The next rank's consolidation drops this one's, so it is read at once.
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            found = optimizer.state_dict()["state"]
    order = [param for group in optimizer.param_groups for param in group["params"]]
    places = {id(param): index for index, param in enumerate(order)}
    return {name: found.get(places[id(param)]) or {} for name, param in params.items()}
