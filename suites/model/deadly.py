"""An engine that takes a rank down where it is built around one kind of module."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from torch import nn

from zharness.engines import Engine, EngineConfig, plain


class Poison(nn.Linear):
    """What the engine dies of."""


def factory(model: nn.Module, config: EngineConfig) -> Engine:
    """The plain engine; around Poison, the end of rank 1."""
    if isinstance(model, Poison) and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain.factory(model, config)
