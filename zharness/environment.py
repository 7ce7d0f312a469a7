"""Set environment variables for the duration of a block, and the variable by which torch looks for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEVICE_VARIABLE = "ZHARNESS_DEVICE"


@contextmanager
def restore_variables(*names: str) -> Iterator[None]:
    """Restore the values of the variables ``names`` at the end of the block; remove variables that were not set."""
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
    """Set variables inside the block, and restore their earlier values at its end."""
    with restore_variables(*values):
        os.environ.update(values)
        yield


def look_for_gpus_by_nvml() -> None:
    """Let ``torch.cuda.is_available`` ask NVML if ranks use GPUs: forked ranks could not use CUDA after a driver call.

    torch asks the driver by default. Call this before code that may query GPUs, such as an engine's import or a user's
    conftest.py.
    """
    if os.environ.get(DEVICE_VARIABLE) == "cuda":
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
