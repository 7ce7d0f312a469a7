"""Seed torch's random generators, and draw on the CPU what every device has to start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zharness.device import is_gpu_requested


@contextmanager
def fork_seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the GPU that computes, if any, and restore their states at the end."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if is_gpu_requested() else []):
        torch.default_generator.manual_seed(seed)
        if is_gpu_requested():
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def draw_on_cpu() -> Iterator[torch.device | None]:
    """Let torch create tensors on the CPU if its default device is a GPU, and yield that GPU, else None.

    The generators of GPUs draw other numbers, and every device has to start from the same ones.
    """
    device = torch.get_default_device()
    if device.type != "cuda":
        yield None
        return
    with torch.device("cpu"):
        yield device
