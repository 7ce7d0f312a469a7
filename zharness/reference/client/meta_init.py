"""Materialise modules that were built on the meta device one by one, while the model is sharded.

``with torch.device("meta"): model = Net()`` builds a model without memory, and ``initialize(model=model, ...)``
materialises it: allocates and initializes its tensors. At stage 3 a rank then never holds more than 1/N of the model
and one full module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.errors import ConfigError


@dataclass(frozen=True)
class DeferredModule:
    """A module that has tensors of its own on the meta device.

    ``reset_parameters`` is the module's method that initializes these tensors, and ``shapes`` has the full shape of
    each.
    """

    module: nn.Module
    reset_parameters: Callable[[], None]
    shapes: Mapping[str, torch.Size]

    @torch.no_grad()
    def materialise(self, device: torch.device) -> list[Tensor]:
        """Allocate the module's own meta tensors on ``device``, initialize them and return them.

        This method runs no collective. Parameters stay the same objects, so tied ones stay tied. A parameter that
        another module has materialised already keeps its values, as if it had been tied after construction: this
        module's ``reset_parameters`` writes to a temporary tensor instead.
        """
        parameters, buffers = self.module._parameters, self.module._buffers
        existing = {name: p for name, p in parameters.items() if p is not None and not p.is_meta}
        materialised: list[Tensor] = [p for name, p in parameters.items() if p is not None and name not in existing]
        for parameter in materialised:
            empty = torch.empty_like(parameter, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[name] = torch.empty_like(buffer, device=device)
                materialised.append(buffers[name])  # type: ignore[arg-type]
        for name, parameter in existing.items():
            parameters[name] = nn.Parameter(torch.empty(self.shapes[name], dtype=parameter.dtype, device=device))
        try:
            self.reset_parameters()
        finally:
            parameters.update(existing)
        return materialised


def find_deferred_modules(model: nn.Module) -> list[DeferredModule]:
    """Return the modules with tensors on the meta device, children before parents.

    This is the order in which constructors draw random numbers. Raises ConfigError, before anything is allocated, for a
    module without ``reset_parameters``.
    """
    return [
        _make_deferred_module(module)
        for module in _children_first(model, set())
        if any(t.is_meta for t in _direct_tensors(module).values())
    ]


def infer_device(model: nn.Module, comm: Comm) -> torch.device:
    """Return the device of the model's parameters; of a model on meta, the device of the process group.

    Groups of gloo are on the CPU and groups of NCCL on the current GPU. Another backend is on the current GPU if this
    process uses CUDA, else on the CPU.
    """
    real = next((p.device for p in model.parameters() if not p.is_meta), None)
    if real is not None:
        return real
    uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    backend = dist.get_backend(comm.group)
    on_gpu = backend == dist.Backend.NCCL or (uses_cuda and backend != dist.Backend.GLOO)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _make_deferred_module(module: nn.Module) -> DeferredModule:
    """Return the DeferredModule for a module with meta tensors.

    Raises ConfigError if the module has no method that initializes them.
    """
    tensors = _direct_tensors(module)
    # nn.MultiheadAttention calls it _reset_parameters.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} has {', '.join(tensors)} on the meta device and no reset_parameters() to give "
            "them values; write that method, or build the model on a real device"
        )
    return DeferredModule(module, reset, {name: tensor.shape for name, tensor in tensors.items()})


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name that ``module`` registers itself, without those of submodules."""
    return {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of a model, each once, children before parents.

    ``visited`` collects the modules that were already yielded.
    """
    if module not in visited:
        visited.add(module)
        for child in module.children():
            yield from _children_first(child, visited)
        yield module
