"""Stand in on a CPU for what Megatron-FSDP takes of ``torch.cuda``: streams, events and the current device.

Megatron-FSDP has no path without a GPU. While engines are open on a CPU, those of its modules that need one get a
``torch`` whose ``cuda`` is ``CpuCuda``; torch itself, and every other module, keep the real one. On a CPU the work of a
stream has ended when the call that enqueued it returns, so that streams and events have nothing to wait for.
What Megatron-FSDP takes otherwise is set by its own options: the device by its argument ``device``, the mesh by
``device_mesh``, and NCCL's PREMUL_SUM by ``gradient_reduce_div_fusion``, without which it divides and then sums.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zharness.errors import EngineContractError

MODULES = tuple(f"megatron_fsdp.{name}" for name in ("megatron_fsdp", "param_and_grad_buffer", "uneven_dtensor"))


@dataclass(frozen=True)
class CpuEvent:
    """An event that has always happened."""

    def wait(self, stream: CpuStream | None = None) -> None:
        """Return at once."""


@dataclass(frozen=True)
class CpuStream:
    """A stream whose work runs as it is enqueued, in the thread of the caller."""

    def wait_stream(self, stream: CpuStream) -> None:
        """Return at once: what was enqueued on ``stream`` has run."""

    def record_event(self) -> CpuEvent:
        """Return an event after all work that was enqueued."""
        return CpuEvent()


class CpuCuda(ModuleType):
    """The part of ``torch.cuda`` that Megatron-FSDP calls. Raises EngineContractError for any other name."""

    Stream = CpuStream

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EngineContractError(f"Megatron-FSDP took torch.cuda.{name}, for which {__name__} has no stand-in")

    def current_stream(self) -> CpuStream:
        """Return the one stream."""
        return CpuStream()

    @contextmanager
    def stream(self, stream: CpuStream) -> Iterator[None]:
        """Return a context that changes nothing."""
        yield

    def current_device(self) -> int:
        """Return 0, the number of the only device."""
        return 0

    def is_available(self) -> bool:
        """Return False, as torch.cuda does on a CPU."""
        return False

    def synchronize(self) -> None:
        """Return at once."""

    def empty_cache(self) -> None:
        """Return at once: the CPU's allocator has no cache to empty."""


class CpuTensor(Tensor):
    """A tensor whose ``cuda()`` leaves it on the CPU, as Megatron-FSDP calls it to check the bounds of shards."""

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor as a plain one."""
        return self.as_subclass(Tensor)


class TorchOnCpu(ModuleType):
    """The module torch, whose ``cuda`` is ``CpuCuda``, and whose ``tensor`` makes CpuTensors."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = CpuCuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> CpuTensor:
        """Return ``torch.tensor`` of the arguments, as a CpuTensor."""
        return torch.tensor(*args, **kwargs).as_subclass(CpuTensor)


class StandIns:
    """Counts the open engines, and gives Megatron-FSDP's modules the stand-ins while there is one."""

    def __init__(self) -> None:
        self._engines = 0

    def install(self) -> Callable[[], None]:
        """Install the stand-ins for one more engine, and return the function that ends this. It may be called twice."""
        self._engines += 1
        if self._engines == 1:
            replace_torch(TorchOnCpu())
        waiting = [self._remove]
        return lambda: waiting.pop()() if waiting else None

    def _remove(self) -> None:
        self._engines -= 1
        if not self._engines:
            replace_torch(torch)


STAND_INS = StandIns()


def replace_torch(module: ModuleType) -> None:
    """Make ``module`` what Megatron-FSDP's modules that use ``torch.cuda`` know as torch."""
    for name in MODULES:
        vars(importlib.import_module(name))["torch"] = module
