"""Make PyTorch's test utilities count CPUs as devices, so that tests that need N accelerators run on N ranks of CPUs.

Set the environment variable ``ZHARNESS_CPU_DEVICES=N`` for this. It has no effect on a machine with an accelerator.
The variable changes what tests see of the machine: ``torch.cpu.device_count()`` and
``torch.accelerator.device_count()`` return N, ``skip_if_lt_x_gpu(x)`` skips only for x above N, and
``requires_accelerator_dist_backend`` accepts gloo. Tests that name CUDA themselves still fail or skip.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from zharness.errors import UsageError

VARIABLE = "ZHARNESS_CPU_DEVICES"


def parse_cpu_devices(text: str) -> int:
    """Return the number of devices in the variable; 0 if it is empty. Raises UsageError if it is invalid."""
    if text and not text.isdecimal():
        raise UsageError(f"got {VARIABLE}={text}; expected a whole number of devices")
    return int(text or 0)


def install_if_requested() -> None:
    """Call ``count_cpus_as_devices`` if the environment variable asks for it and the machine has no accelerator."""
    count = parse_cpu_devices(os.environ.get(VARIABLE, ""))
    if count and torch.accelerator.current_accelerator() is None:
        count_cpus_as_devices(count)


def count_cpus_as_devices(count: int) -> None:
    """Make torch and its test utilities report ``count`` devices in this process and in its forks.

    Call this before a test file is imported: test files copy these names and evaluate decorators.
    """
    changes: list[tuple[Any, str, Any]] = [
        (torch.cpu, "device_count", lambda: count),
        (torch.accelerator, "device_count", lambda: count),
        (common_distributed, "skip_if_lt_x_gpu", make_skip_decorator(count)),
        (common_distributed, "at_least_x_gpu", lambda needed: needed <= count),
        (common_distributed, "requires_accelerator_dist_backend", accept_gloo),
        (common_fsdp, "DEVICE_COUNT", count),
        (common_utils, "TEST_MULTIACCELERATOR", count > 1),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def make_skip_decorator(count: int) -> Callable[..., Any]:
    """Return a replacement for ``skip_if_lt_x_gpu`` that skips tests which need more than ``count`` devices."""

    def skip_if_lt_x_gpu(needed: int, *, allow_cpu: bool = False) -> Callable[..., Any]:
        """Skip a test that needs more devices, unless ``allow_cpu`` is true."""

        def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(test)
            def run_or_skip(case: Any, *args: Any, **kwargs: Any) -> Any:
                if needed > count and not allow_cpu:
                    case.skipTest(common_distributed.TEST_SKIPS[f"multi-gpu-{needed}"].message)
                return test(case, *args, **kwargs)

            return run_or_skip

        return decorate

    return skip_if_lt_x_gpu


def accept_gloo(backends: object = None) -> Callable[[Any], Any]:
    """Replace ``requires_accelerator_dist_backend``: return a decorator that changes nothing, because gloo suffices."""
    return lambda test: test
