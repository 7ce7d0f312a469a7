"""Measure how fast this machine reads memory and multiplies, from which the time of a model's cells is estimated."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

PROBE_ELEMENTS = 1 << 24  # elements of a tensor that, like a model's tensors, is too large for the caches


@dataclass(frozen=True)
class MachineSpeed:
    """The speed of this machine: the seconds to read and write a byte, and the slowdown by autocast.

    ``autocast_slowdown`` is the time of a bf16 product divided by that of an fp32 product. The quotient is 20 or more
    on processors without bf16 instructions.
    """

    seconds_per_byte: float
    autocast_slowdown: float


def measure_machine_speed() -> MachineSpeed:
    """Measure the speed of this machine, which takes a fraction of a second."""
    large, rows = torch.ones(PROBE_ELEMENTS), torch.ones(64, 512)
    layer = nn.Linear(512, 512, bias=False)

    def time_product(dtype: torch.dtype) -> float:
        """Time forward and backward of a linear layer in ``dtype``."""
        model, inputs = copy.deepcopy(layer).to(dtype), rows.to(dtype).requires_grad_()
        return time_fastest_run(lambda: model(inputs).sum().backward())

    return MachineSpeed(
        time_fastest_run(lambda: large + large) / large.nbytes,
        max(1.0, time_product(torch.bfloat16) / time_product(torch.float32)),
    )


def time_fastest_run(function: Callable[[], object], tries: int = 3) -> float:
    """Return the seconds of the fastest of ``tries`` runs.

    The first run fills caches, and other processes may interrupt the later runs.
    """
    durations = []
    for _ in range(tries):
        began = time.perf_counter()
        function()
        durations.append(time.perf_counter() - began)
    return min(durations)
