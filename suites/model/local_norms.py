"""Engines that lose the synchronization of a model's norms."""

from __future__ import annotations

from typing import Any

from torch import nn

from zharness import engines
from zharness.engines import EngineConfig
from zharness.workload.synchronized_norm import SynchronizedBatchNorm


class LocalNorm(SynchronizedBatchNorm):
    """A norm over the rows of one rank."""

    forward = nn.modules.batchnorm._BatchNorm.forward


def normalize_alone(model: nn.Module) -> nn.Module:
    """Return the model, each of whose synchronized norms sees the rows of its own rank alone."""
    for module in model.modules():
        if isinstance(module, SynchronizedBatchNorm):
            module.__class__ = LocalNorm
    return model


def reference(model: nn.Module, config: EngineConfig) -> Any:
    """Return the reference engine around norms that see one rank."""
    return engines.get("reference")(normalize_alone(model), config)


def deepspeed(model: nn.Module, config: EngineConfig) -> Any:
    """Return DeepSpeed around norms that see one rank."""
    return engines.get("deepspeed")(normalize_alone(model), config)
