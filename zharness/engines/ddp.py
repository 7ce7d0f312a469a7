"""``torch.nn.parallel.DistributedDataParallel`` behind the Engine protocol: stage 0, everything whole on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zharness.engines.common import NO_STATE_LAWS, NOT_JOINED, Parts, TorchEngine, itself, leaves, nothing, require
from zharness.engines.protocol import Capabilities, EngineConfig, Feature, Reduction

CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    refuses={
        Feature.RETAIN_GRAPH: (
            "the second backward on a retained graph is not reduced: open issue 'DDP doesn't work with retain_graph = "
            "True' (https://github.com/pytorch/pytorch/issues/47260); the design note says why, prepare_for_backward() "
            "'is called at the end of DDP forward pass' (https://docs.pytorch.org/docs/stable/notes/ddp.html)"
        ),
        Feature.ENGINE_ACCUMULATION: (
            "DDP leaves it to the caller: gradients accumulate in no_sync() and are 'synchronized in the first "
            "forward-backward pass exiting the context' "
            "(https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)"
        ),
        Feature.CHECKPOINT: NO_STATE_LAWS,
        **NOT_JOINED,
    },
)

OPTIONS = {
    "broadcast_buffers": "rank 0's buffers before each forward; default true",
    "bucket_cap_mb": "bytes of a bucket in MiB",
    "find_unused_parameters": "look for parameters without gradient in each forward",
    "gradient_as_bucket_view": "gradients are views of the buckets",
    "static_graph": "the graph never changes",
}


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """DDP around ``model`` over the default group, on the device of its parameters. Collective.

    Raises ConfigError for a configuration that DDP does not honour.
    """
    require(config, CAPABILITIES, OPTIONS)
    wrapped = DistributedDataParallel(model, **config.options)
    if config.reduction is Reduction.SUM:
        # A lambda: DDP compares the hook's annotations with the classes, and ours are strings.
        wrapped.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer()))
    parts = Parts(
        # Held by the engine alone: when it goes, the reducer's destructor takes its hooks off the parameters.
        forward=wrapped.__call__,
        no_sync=wrapped.no_sync,
        params=leaves(model),
        whole=itself,
        layout={},
        forget=nothing,
        release=nothing,
    )
    return TorchEngine(model, CAPABILITIES, config, parts)


def summed(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """The sum over ranks of a bucket's gradients, in place; DDP's own reduction divides by the world size first."""
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    reduced: torch.futures.Future[list[Tensor]] = work.get_future()
    return reduced.then(lambda done: done.value()[0])
