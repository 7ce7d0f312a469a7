"""Set environment variables for the time of a block, and that by which torch looks for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEVICE_VARIABLE = "ZHARNESS_DEVICE"


@contextmanager
def restore_variables(*names: str) -> Iterator[None]:
    """Give the variables ``names`` back their values at the end of the block; those that were not set are removed."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside the block, and give them back their earlier values at its end."""
    with restore_variables(*values):
        os.environ.update(values)
        yield


def look_for_gpus_by_nvml() -> None:
    """Let ``torch.cuda.is_available`` ask NVML if ranks use GPUs: the driver cannot be used after a fork.

    torch asks the driver by default. Call this before code that might ask: an engine's import, a user's conftest.py.
    """
    if os.environ.get(DEVICE_VARIABLE) == "cuda":
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
