"""Adapt plain PyTorch to the Engine protocol: the unwrapped model on one process."""

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
    """Build the baseline for ``config``: one process that does not use ``torch.distributed``.

    ``config`` is the configuration of the engine under test. So the baseline ignores the settings that must not change
    a number (stage, options) and the one that has no meaning on one process (reduction). If the engine owns
    accumulation, ``backward`` and ``scale`` divide the loss, but a plain ``loss.backward()`` does not.
    """
    validate_dtype(config, CAPABILITIES)
    adapter = EngineAdapter(
        forward=model.__call__,
        no_sync=nullcontext,
        params=leaf_parameters(model),
        full_tensors=identity,
        layout={},
        drop_gradients=do_nothing,
        release=do_nothing,
    )
    return TorchEngine(model, CAPABILITIES, config, adapter)
