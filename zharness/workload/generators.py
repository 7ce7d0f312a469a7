"""Seed torch's random generators, and draw on the CPU the numbers that must be the same on every device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zharness.device import is_gpu_requested


@contextmanager
def fork_seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the GPU that computes, if any, and restore their states at the end."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if is_gpu_requested() else []):
        torch.default_generator.manual_seed(seed)
        if is_gpu_requested():
            torch.cuda.manual_seed(seed)
        yield


def read_generator_states() -> list[Tensor]:
    """Return the states of the generators of the CPU and of the GPU that computes, if any."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if is_gpu_requested() else [])]


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Set the generators to ``states``, which ``read_generator_states`` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def have_drawn_since(states: Sequence[Tensor]) -> bool:
    """Return whether a generator has another state than in ``states``, which ``read_generator_states`` returned."""
    return not all(map(torch.equal, read_generator_states(), states))


@contextmanager
def draw_on_cpu() -> Iterator[torch.device | None]:
    """Let torch create tensors on the CPU if its default device is a GPU, and yield that GPU, else None.

    The generators of GPUs draw other numbers, and every device has to start from the same numbers.
    """
    device = torch.get_default_device()
    if device.type != "cuda":
        yield None
        return
    with torch.device("cpu"):
        yield device
