"""Replace ``torch.testing._internal.common_fsdp``: FSDPTest and FSDPTestContinuous run on this package's ranks.

The module has every other name of PyTorch's module unchanged.
"""

from __future__ import annotations

from typing import Any

from torch.testing._internal import common_fsdp

from zharness.compat.pytorch.common_distributed import MultiProcContinuousTest, MultiProcessTestCase


class FSDPTest(MultiProcessTestCase, common_fsdp.FSDPTest):
    """Base class of FSDP tests that run on new ranks, with a process group for each test."""


class FSDPTestContinuous(MultiProcContinuousTest, common_fsdp.FSDPTestContinuous):
    """Base class of FSDP tests that run on pooled ranks with the process group of their class."""

    world_size: int = common_fsdp.DEVICE_COUNT


def __getattr__(name: str) -> Any:
    """Return a name of PyTorch's module."""
    return getattr(common_fsdp, name)
