"""The unwrapped model on one process: the baseline, behind the protocol of the engines it judges."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from zharness.engines.protocol import Capabilities, EngineConfig, Feature
from zharness.engines.torch_engine import (
    STATE_LAWS_NOT_CLAIMED,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    identity,
    leaf_parameters,
    validate_dtype,
)

CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    refuses=dict.fromkeys((Feature.CHECKPOINT, Feature.UNIVERSAL_CHECKPOINT), STATE_LAWS_NOT_CLAIMED),
)


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """The baseline for ``config``; a world of one that never touches ``torch.distributed``.

    It takes the very configuration of the engine it is laid beside, so it ignores what must not change a number (stage,
    options) and what has no meaning for one process (reduction). Where the engine owns accumulation, ``backward`` and
    ``scale`` divide the loss; a bare ``loss.backward()`` is the caller's, and divides nothing.
    """
    validate_dtype(config, CAPABILITIES)
    parts = EngineAdapter(
        forward=model.__call__,
        no_sync=nullcontext,
        params=leaf_parameters(model),
        full_tensor=identity,
        layout={},
        drop_gradients=do_nothing,
        release=do_nothing,
    )
    return TorchEngine(model, CAPABILITIES, config, parts)
