"""``torch.nn.parallel.DistributedDataParallel`` behind the Engine protocol: stage 0, everything whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zharness.engines.protocol import Capabilities, EngineConfig, Feature, Reduction
from zharness.engines.torch_checkpoint import SINGLE_FILE_FORMAT
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    identity,
    leaf_parameters,
    validate_config,
)

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
REFUSES = {
    **TORCH_REFUSES,
    Feature.RANK_BUFFERS: (
        "one rank saves for all: 'save the model in only one process and then load it on all processes' "
        "(https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html)"
    ),
    Feature.ENGINE_ACCUMULATION: (
        "DDP leaves it to the caller: gradients accumulate in no_sync() and are 'synchronized in the first "
        f"forward-backward pass exiting the context' ({DOCUMENTATION})"
    ),
    Feature.OWN_WEIGHT_GRADIENTS: (
        "'This module doesn't work with torch.autograd.grad() (i.e. it will only work if gradients are to be "
        f"accumulated in .grad attributes of parameters)' ({DOCUMENTATION})"
    ),
    Feature.UNFREEZING: (
        "its constructor registers what reduces gradients: 'if you change the model's parameters afterwards, gradient "
        f"reduction functions no longer match the correct set of parameters' ({DOCUMENTATION})"
    ),
    Feature.EDITS: f"'Parameters are never broadcast between processes', so all ranks edit alike ({DOCUMENTATION})",
    Feature.DEFERRED: "its constructor broadcasts the values of rank 0, and parameters on the meta device have none",
    Feature.RESOURCES: (
        "it does not count its buckets, a second copy of the gradients unless gradient_as_bucket_view is set "
        f"({DOCUMENTATION})"
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "small_buckets": {"bucket_cap_mb": 1e-4},
    "gradients_in_buckets": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}
# What has accumulated is in each further mean, so over three ranks a sum of several backwards comes a bit off.
SCALED_SUM_REASON = "it averages, whatever its caller wants; the sum is its mean of gradients times the number of ranks"
CAPABILITIES = Capabilities(stages=frozenset({0}), refuses=REFUSES, variants=VARIANTS, scaled_sum=SCALED_SUM_REASON)

OPTIONS = {
    "broadcast_buffers": "rank 0's buffers before each forward; default true",
    "bucket_cap_mb": "bytes of a bucket in MiB",
    "find_unused_parameters": "look for parameters without gradient in each forward",
    "gradient_as_bucket_view": "gradients are views of the buckets",
    "static_graph": "the graph never changes",
    **AUTOCAST_OPTION,
}


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """DDP around ``model`` over the default group, on the device of its parameters. Collective.

    Raises ConfigError for a configuration that DDP does not honour.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    return TorchEngine(model, CAPABILITIES, config, wrap_in_ddp(model, config))


def wrap_in_ddp(model: nn.Module, config: EngineConfig) -> EngineAdapter:
    """``model`` wrapped by DDP, and what an engine has to know of it."""
    own = {name: value for name, value in config.options.items() if name not in AUTOCAST_OPTION}
    wrapped = DistributedDataParallel(model, **own)
    # Not a communication hook: DDP reduces what has accumulated, and would sum what is a sum already.
    summed = trainable_parameters(model) if config.reduction is Reduction.SUM else []
    hooks = [parameter.register_hook(multiply_by_world_size) for parameter in summed]  # type: ignore[no-untyped-call]
    return EngineAdapter(
        # Held by the engine alone: when it goes, the reducer's destructor takes its hooks off the parameters.
        forward=wrapped.__call__,
        no_sync=wrapped.no_sync,
        params=leaf_parameters(model),
        full_tensor=identity,
        layout={},
        drop_gradients=do_nothing,
        release=partial(remove_hooks, hooks),
        checkpoint_format=SINGLE_FILE_FORMAT,
    )


def remove_hooks(hooks: Sequence[RemovableHandle]) -> None:
    """At the engine's end, or a later gradient of the same parameters would be N times its own."""
    for hook in hooks:
        hook.remove()


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What DDP reduces: the parameters that require a gradient when it is made."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def multiply_by_world_size(gradient: Tensor | None) -> Tensor | None:
    """What DDP's mean turns into the sum; None where a static graph's first iteration has no gradient yet."""
    return None if gradient is None else gradient * dist.get_world_size()
