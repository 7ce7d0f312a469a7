"""Names of DeepSpeed that test files import at their top, and that the reference engine does not have.

They exist so that a file can be collected; the tests that use them fail with one sentence.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

from torch import nn

from zharness.errors import UsageError


class OffloadDeviceEnum(str, Enum):
    """The device of an offloaded tensor, as DeepSpeed's JSON names it."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class RepeatingLoader:
    """An iterator over a loader that begins again when the loader ends."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
            return next(self._iterator)


def keep_constructor(constructor: Any, target_dtype: Any) -> Any:
    """Return ``constructor``, which makes tensors, unchanged: ``zero.Init`` casts Parameters at its end instead."""
    return constructor


class OpBuilder:
    """A builder of a C++ or CUDA operator that is never compatible, as on a machine without a compiler."""

    NAME: ClassVar[str] = "op"

    @staticmethod
    def is_compatible(*_: Any, **__: Any) -> bool:
        """Return False."""
        return False


def make_builder(name: str) -> type[OpBuilder]:
    """Return a subclass of ``OpBuilder`` with this NAME."""
    return type(name, (OpBuilder,), {"NAME": name, "__doc__": f"The builder of DeepSpeed's operator {name}."})


class PipelineModule(nn.Module):
    """A model split into pipeline stages, which ``initialize`` refuses."""

    def __init__(self, layers: Any = (), *_: Any, **__: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))


def make_unsupported(name: str) -> type:
    """Return a class whose construction raises UsageError."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise UsageError(f"the reference engine has no {name}, so this test of DeepSpeed cannot run on it")

    return type(name, (nn.Module,), {"__init__": refuse, "__doc__": f"{name} of DeepSpeed, which is not supported."})
