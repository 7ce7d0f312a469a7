"""Stand in for ``deepspeed.accelerator``: answer what tests ask of the device on which the ranks run."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from zharness.device import compute_device_type


class Accelerator:
    """The device type of the ranks, with the methods of DeepSpeed's accelerator that its tests call.

    Unlike DeepSpeed's CPU accelerator, this one supports float16, because torch computes in float16 on CPUs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._communication_backend_name = "gloo" if name == "cpu" else "nccl"

    def device_name(self, index: int | None = None) -> str:
        """Return the device type, with the number of the device if ``index`` is given."""
        return self._name if index is None or self._name == "cpu" else f"{self._name}:{index}"

    def current_device(self) -> int:
        """Return the number of this rank's device."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """Return the name of this rank's device, such as ``cpu`` or ``cuda:0``."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices: of GPUs, or on CPUs the number of local ranks."""
        return int(os.environ.get("LOCAL_SIZE", "1")) if self._name == "cpu" else torch.cuda.device_count()

    def communication_backend_name(self) -> str:
        """Return the name of the process group's backend."""
        return self._communication_backend_name

    def is_available(self) -> bool:
        """Return whether there is a device."""
        return self._name == "cpu" or torch.cuda.is_available()

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in float16."""
        return True

    def is_triton_supported(self) -> bool:
        """Return False: the reference engine uses no Triton kernels."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which the reference engine trains."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished its work."""
        if self._name != "cpu":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Free cached device memory."""
        if self._name != "cpu":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of device memory that tensors occupy, which is 0 on CPUs."""
        return 0 if self._name == "cpu" else torch.cuda.memory_allocated(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of the device."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed)

    def random(self) -> Any:
        """Return the module with the functions of the random generator."""
        return torch.random

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on the device type of the ranks."""
        return tensor.device.type == self._name

    def range_push(self, message: str) -> None:
        """Do nothing: profiling ranges change no number."""

    def range_pop(self) -> None:
        """Do nothing: profiling ranges change no number."""


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return Accelerator(compute_device_type())


def is_current_accelerator_supported() -> bool:
    """Return whether the accelerator is one that DeepSpeed lists, which both device types are."""
    return True
