"""Run a backward by the call that a setting, a law variant or a program names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Engine
from zharness.law_kit.setting import BackwardCall


def call_backward(engine: Engine, loss: Tensor, call: BackwardCall, **options: Any) -> None:
    """Run ``engine.backward(loss)``, ``loss.backward()`` or ``engine.scale(loss).backward()``.

    ``options`` are keyword arguments of the call, such as ``retain_graph``.
    """
    if call is BackwardCall.ENGINE:
        engine.backward(loss, **options)
    elif call is BackwardCall.TENSOR:
        torch.autograd.backward(loss, **options)
    else:
        torch.autograd.backward(engine.scale(loss), **options)
