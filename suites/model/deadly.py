"""An engine that kills a rank while it is built around one kind of module."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from torch import nn

from zharness.engines import Engine, EngineConfig, plain


class Poison(nn.Linear):
    """The module around which the engine dies."""


def factory(model: nn.Module, config: EngineConfig) -> Engine:
    """Build the plain engine; kill rank 1 if the model is a Poison."""
    if isinstance(model, Poison) and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain.factory(model, config)
