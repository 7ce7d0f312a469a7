"""Adapt ``torch.nn.parallel.DistributedDataParallel`` to the Engine protocol: stage 0, nothing is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zharness.engines import optimizers
from zharness.engines.gpu_options import (
    FUSED,
    GPU_OPTIONS,
    build_fused_optimizer,
    compile_in_place,
    drop_compiled_graphs,
    shared_options,
)
from zharness.engines.protocol import BufferPromise, Capabilities, EngineConfig, EngineOption, Feature, Reduction
from zharness.engines.torch_checkpoint import SINGLE_FILE_FORMAT
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    call_each,
    do_nothing,
    identity,
    leaf_parameters,
    validate_config,
    without_refusal,
)

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
REFUSES = {
    **TORCH_REFUSES,
    Feature.RANK_BUFFERS: (
        "one rank saves the buffers for all: 'save the model in only one process and then load it on all processes' "
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
        "its constructor registers the hooks that reduce gradients: 'if you change the model's parameters afterwards, "
        f"gradient reduction functions no longer match the correct set of parameters' ({DOCUMENTATION})"
    ),
    Feature.EDITS: (
        f"'Parameters are never broadcast between processes', so all ranks must make the same edit ({DOCUMENTATION})"
    ),
    Feature.SHARD_ACCESS: "nothing is sharded, so that a rank has no shards of its own",
    Feature.DEFERRED: "its constructor broadcasts the values of rank 0, and parameters on the meta device have none",
    Feature.RESOURCES: (
        "its buckets, a second copy of the gradients without gradient_as_bucket_view, are not counted "
        f"({DOCUMENTATION})"
    ),
}
CHANGES_GRAPH = (
    "'Static graph means 1) The set of used and unused parameters will not change during the whole training loop; "
    f"2) How the graph is trained will not change' ({DOCUMENTATION})"
)
# Laws that need these features change the autograd graph between iterations.
GRAPH_CHANGING_FEATURES = (
    *(Feature.AUTOGRAD, Feature.RETAIN_GRAPH, Feature.TORCH_FUNC, Feature.TRANSFORMS, Feature.PARAMETERS),
    *(Feature.NO_SYNC, Feature.SUBMODULES, Feature.CALLER_ACCUMULATION),
)
VARIANTS: dict[str, EngineOption | dict[str, Any]] = {
    "small_buckets": EngineOption(
        {"bucket_cap_mb": 1e-4},
        excludes=dict.fromkeys(
            ("captured", "compiled", "cuda_graphs"),
            "torch.compile's splitting of the graph by buckets asserts 'First bucket should be smaller/equal to other "
            "buckets to get comms warmed up ASAP', and its first bucket has 1 MiB (_dynamo/backends/distributed.py)",
        ),
    ),
    "gradients_in_buckets": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": EngineOption(
        {"static_graph": True},
        refuses={
            **dict.fromkeys(GRAPH_CHANGING_FEATURES, CHANGES_GRAPH),
            Feature.CHECKPOINT: "the layout of its buckets depends on the iterations that DDP has seen, so that over "
            "more than two ranks a resumed training sums in another order",
        },
    ),
}
# Each backward averages the gradients accumulated so far, so on three ranks the sum of several backwards is rounded.
SCALED_SUM_REASON = "DDP can only average; the adapter multiplies gradients by the world size before the mean"
ORDER_SETTLES_REASON = (
    "after its first backward DDP lays its buckets out anew, in the order in which gradients became ready "
    "(Reducer::rebuild_buckets); the place of a gradient in its bucket decides in which order the ranks are summed"
)
CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    refuses=without_refusal(Feature.AUTOCAST_SCALER, REFUSES),
    variants={**VARIANTS, **shared_options()},
    scaled_sum=SCALED_SUM_REASON,
    order_settles=ORDER_SETTLES_REASON,
    buffers=BufferPromise.FROM_RANK_0,  # broadcast_buffers is true by default
    unused_parameters_option="find_unused_parameters",
)

OPTIONS = {
    "broadcast_buffers": "broadcast rank 0's buffers before each forward; default true",
    "bucket_cap_mb": "size of each gradient bucket in MiB",
    "find_unused_parameters": "after each forward, find the parameters that get no gradient",
    "gradient_as_bucket_view": "make gradients views of the buckets",
    "static_graph": "declare that the autograd graph is the same in every iteration",
    **AUTOCAST_OPTION,
}


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Wrap ``model`` in DDP over the default process group, on the device of its parameters. This is a collective.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, {**OPTIONS, **GPU_OPTIONS})
    return TorchEngine(model, CAPABILITIES, config, wrap_in_ddp(model, config))


def wrap_in_ddp(model: nn.Module, config: EngineConfig) -> EngineAdapter:
    """Wrap ``model`` in DDP, and return the EngineAdapter with its functions and parameters."""
    ddp_options = {
        name: value for name, value in config.options.items() if name not in {**AUTOCAST_OPTION, **GPU_OPTIONS}
    }
    wrapped = DistributedDataParallel(model, **ddp_options)
    is_compiled = compile_in_place(wrapped, config.options)
    # Not a communication hook: DDP reduces accumulated gradients, so such a hook would multiply earlier sums again.
    summed = trainable_parameters(model) if config.reduction is Reduction.SUM else []
    hooks = [parameter.register_hook(multiply_by_world_size) for parameter in summed]  # type: ignore[no-untyped-call]
    return EngineAdapter(
        # The only reference to the wrapper: when the engine drops it, the reducer's destructor removes its hooks.
        forward=wrapped.__call__,
        no_sync=wrapped.no_sync,
        params=leaf_parameters(model),
        full_tensors=identity,
        layout={},
        drop_gradients=do_nothing,
        release=partial(call_each, partial(remove_hooks, hooks), drop_compiled_graphs if is_compiled else do_nothing),
        build_optimizer=build_fused_optimizer if config.options.get(FUSED) else optimizers.build,
        checkpoint_format=SINGLE_FILE_FORMAT,
    )


def remove_hooks(hooks: Sequence[RemovableHandle]) -> None:
    """Remove hooks, so that they do not multiply later gradients of the same parameters by the world size."""
    for hook in hooks:
        hook.remove()


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces: those that require a gradient when it is built."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def multiply_by_world_size(gradient: Tensor | None) -> Tensor | None:
    """Return a local gradient times the world size, so that DDP's mean over ranks becomes the sum.

    ``gradient`` is None in the first iteration of a static graph.
    """
    return None if gradient is None else gradient * dist.get_world_size()
