"""Replace ``torch.testing._internal.common_distributed``: its classes that spawn processes run on this package's ranks.

The module has every other name of PyTorch's module unchanged.
"""

from __future__ import annotations

from typing import Any

from torch.testing._internal import common_distributed

from zharness.compat.pytorch import cpu_devices
from zharness.compat.pytorch.rank_classes import RankContinuousTest, RankTestCase

cpu_devices.install_if_requested()


class MultiProcessTestCase(RankTestCase, common_distributed.MultiProcessTestCase):
    """Base class of tests that run on ``world_size`` new ranks without process group."""


class DistributedTestBase(MultiProcessTestCase, common_distributed.DistributedTestBase):
    """Base class of tests that form a process group with ``create_pg(device)``."""


class MultiProcContinuousTest(RankContinuousTest, common_distributed.MultiProcContinuousTest):
    """Base class of tests that run on pooled ranks with the process group of their class."""


class C10dTorchCommsTestBase(MultiProcContinuousTest, common_distributed.C10dTorchCommsTestBase):
    """Base class of tests whose process group runs on torchcomms; they are skipped where that is not installed."""


def __getattr__(name: str) -> Any:
    """Return a name of PyTorch's module."""
    return getattr(common_distributed, name)
