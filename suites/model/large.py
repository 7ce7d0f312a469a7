"""Models that do not fit into memory, and factories that cannot run without memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from suites.model.tiny import draw, score

LARGE_WIDTH = 1 << 17  # a layer has 2**34 weights, 64 GiB


def many_layers() -> Any:
    """Return a model of 6.4 TiB."""
    return nn.Sequential(nn.Linear(5, LARGE_WIDTH), *(nn.Linear(LARGE_WIDTH, LARGE_WIDTH) for _ in range(100))), draw


def of_half_a_gib() -> Any:
    """Return a model of 0.5 GiB, which needs 6.0 GiB in one rank."""
    return nn.Sequential(nn.Linear(5, 1 << 14), nn.Linear(1 << 14, 1 << 13)), draw, score


def of_64_mib() -> Any:
    """Return a model of 64 MiB, which needs 1.2 GiB in one rank."""
    return nn.Sequential(nn.Linear(5, 1 << 12), nn.Linear(1 << 12, 1 << 12)), draw, score


def of_120_mib() -> Any:
    """Return a model of 31 M parameters."""
    return nn.Sequential(nn.Linear(5, 5600), nn.Linear(5600, 5600)), draw, score


def of_100_million() -> Any:
    """Return a model of 382 MiB, with 100 M parameters."""
    return nn.Sequential(nn.Linear(5, 10000), nn.Linear(10000, 10000)), draw, score


def of_4_mib() -> Any:
    """Return a model of 4 MiB."""
    return nn.Sequential(nn.Linear(5, 1 << 10), nn.Linear(1 << 10, 1 << 10)), draw, score


def with_large_buffers() -> Any:
    """Return a model of 1 MiB with 4 MiB of buffers that no forward reads."""
    model = nn.Sequential(nn.Linear(5, 1 << 9), nn.Linear(1 << 9, 1 << 9))
    model.register_buffer("table", torch.zeros(1 << 9, 1 << 10))
    model.register_buffer("scratch", torch.zeros(1 << 9, 1 << 10), persistent=False)
    return model, draw, score


def adapter_on_frozen_layers() -> Any:
    """Return a bf16 model of 0.75 GiB, of which 32 thousand weights are trained."""
    frozen = [nn.Linear(1 << 12, 1 << 12, bias=False, dtype=torch.bfloat16) for _ in range(24)]
    base = nn.Sequential(*frozen).requires_grad_(False)
    return nn.Sequential(base, nn.Linear(1 << 12, 8, bias=False, dtype=torch.bfloat16)), draw, score


def converted() -> Any:
    """Return a bf16 model of 8 GiB, converted from fp32."""
    return nn.Sequential(nn.Linear(5, LARGE_WIDTH), nn.Linear(LARGE_WIDTH, LARGE_WIDTH // 4)).bfloat16(), draw, score


def reading_its_weights() -> Any:
    """Return a model of 0.5 GiB from a factory that reads a number from a weight."""
    first = nn.Linear(5, 1 << 14)
    width = (1 << 13) + int(first.weight.mean().item() > 1)
    return nn.Sequential(first, nn.Linear(1 << 14, width)), draw, score


def reading_a_small_weight() -> Any:
    """Return a small model from a factory that reads a number from a weight."""
    layer = nn.Linear(5, 3)
    return nn.Sequential(layer, nn.Linear(3, 2 + int(layer.weight.mean().item() > 1))), draw, score


def ending_its_process() -> Any:
    """End the process."""
    os._exit(7)


LAYERS: list[nn.Module] = []


def reuse_layer() -> Any:
    """Return a new model around a layer that the first call of this process built, and whose weights no call draws."""
    first = nn.Linear(5, 3)
    if not LAYERS:
        LAYERS.append(nn.utils.skip_init(nn.Linear, 3, 2))
    with torch.no_grad():
        LAYERS[0].weight.fill_(0.5)
        LAYERS[0].bias.fill_(0.5)
    return nn.Sequential(first, LAYERS[0]), draw, score
