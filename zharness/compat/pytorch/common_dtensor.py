"""Replace ``torch.testing._internal.distributed._tensor.common_dtensor``: its test classes run on this package's ranks.

The module has every other name of PyTorch's module unchanged. LocalDTensorTestBase simulates all ranks in one process
and needs no ranks.
"""

from __future__ import annotations

from typing import Any

from torch.testing._internal.distributed._tensor import common_dtensor

from zharness.compat.pytorch.common_distributed import MultiProcContinuousTest, MultiProcessTestCase


class DTensorTestBase(MultiProcessTestCase, common_dtensor.DTensorTestBase):
    """Base class of DTensor tests that run on new ranks; ``with_comms`` forms the process group."""


class DTensorContinuousTestBase(MultiProcContinuousTest, common_dtensor.DTensorContinuousTestBase):  # type: ignore[misc]
    """Base class of DTensor tests that run on pooled ranks with the process group of their class."""


def __getattr__(name: str) -> Any:
    """Return a name of PyTorch's module."""
    return getattr(common_dtensor, name)
