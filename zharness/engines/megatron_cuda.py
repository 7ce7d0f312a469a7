"""Stand in on a CPU for the parts of ``torch.cuda`` that Megatron-FSDP uses: streams, events and the current device.

Megatron-FSDP has no code path without a GPU. While engines are open on a CPU, the modules of Megatron-FSDP that need
``torch.cuda`` get a stand-in for ``torch`` whose ``cuda`` is ``CpuCuda``. torch itself and all other modules keep the
real ``torch.cuda``. On a CPU the work of a stream has ended when the call that enqueued it returns, so streams and
events have nothing to wait for. Megatron-FSDP's own options replace its other uses of a GPU: the argument ``device``
sets the device, and ``device_mesh`` sets the mesh. Without ``gradient_reduce_div_fusion`` it does not use NCCL's
PREMUL_SUM, but divides and then sums.
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
    """An event that has already happened."""

    def wait(self, stream: CpuStream | None = None) -> None:
        """Return at once."""


@dataclass(frozen=True)
class CpuStream:
    """A stream whose work runs as it is enqueued, in the thread of the caller."""

    def wait_stream(self, stream: CpuStream) -> None:
        """Return at once, because all work that was enqueued on ``stream`` has run."""

    def record_event(self) -> CpuEvent:
        """Return an event that follows all enqueued work."""
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
    """A tensor that ``cuda()`` leaves on the CPU; Megatron-FSDP calls ``cuda()`` to check the bounds of shards."""

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
    """Counts the open engines, and gives Megatron-FSDP's modules the stand-ins while any engine is open."""

    def __init__(self) -> None:
        self._engines = 0

    def install(self) -> Callable[[], None]:
        """Install the stand-ins for one more engine; return the function that removes them, which may run twice."""
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
    """Give ``module`` the name ``torch`` in those modules of Megatron-FSDP that use ``torch.cuda``."""
    for name in MODULES:
        vars(importlib.import_module(name))["torch"] = module
