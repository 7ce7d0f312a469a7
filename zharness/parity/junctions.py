"""Insert junctions, autograd nodes that an engine adds around modules, into the graph of the baseline as well.

A node around a module computes nothing, but it changes the order of a sum. If a tensor is used twice behind the node,
autograd adds the gradients of these two uses to each other before it adds the gradients of other uses, and (a + b) + c
is not always a + (b + c). Both sums are right, but plain PyTorch computes the same sum only with the same nodes.
Junctions hide no wrong number, since the baseline's gradients still come from torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # FSDP2 uses these too

from zharness.errors import EngineContractError
from zharness.workload import ModelSpec

JunctionSelector = Callable[[nn.Module, Mapping[str, Any]], Sequence[nn.Module]]  # (model, engine options) -> modules


class Junction(torch.autograd.Function):
    """An autograd function that returns several tensors unchanged, as one node of the autograd graph."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors unchanged."""
        return tensors

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients unchanged."""
        return grads


def insert_junction(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pass all inputs of a module that require a gradient through one ``Junction``.

    This function is a forward pre-hook.
    """
    leaves, tree = tree_flatten((args, kwargs))
    positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if positions and torch.is_grad_enabled():
        passed = Junction.apply(*[leaves[position] for position in positions])  # type: ignore[no-untyped-call]
        for position, tensor in zip(positions, passed, strict=True):
            leaves[position] = tensor
    return tree_unflatten(leaves, tree)


@dataclass(frozen=True)
class JunctionModelBuilder:
    """A callable that builds a model with junctions. Builders that are equal share the entries of caches.

    ``select_modules(model, options)`` returns the modules whose inputs get a junction.
    """

    build: Callable[[], nn.Module]
    select_modules: JunctionSelector
    options: Mapping[str, Any] = field(hash=False)

    def __call__(self) -> nn.Module:
        """Build the model and register the forward pre-hooks that insert the junctions."""
        model = self.build()
        for name in junction_module_names(self):
            model.get_submodule(name).register_forward_pre_hook(insert_junction, with_kwargs=True)
        return model


@cache
def junction_module_names(builder: JunctionModelBuilder) -> tuple[str, ...]:
    """Return the names of the modules that ``builder.select_modules`` selects.

    ``select_modules`` belongs to the engine and may change the model, so it is called with a separate model, and the
    baseline's model stays plain. Raises EngineContractError if it returns anything but distinct modules of that model.
    """
    with torch.random.fork_rng(devices=[]):  # the caller's generator must not advance
        model = builder.build()
    names = {id(module): name for name, module in model.named_modules()}
    modules = builder.select_modules(model, builder.options)
    selected = [id(module) for module in modules]
    if not names.keys() >= {*selected} or len({*selected}) < len(selected):
        raise EngineContractError(
            f"Capabilities.junctions returned {len(modules)} modules "
            f"({', '.join(type(module).__name__ for module in modules)}); "
            "expected modules of the model that was passed to it, each at most once"
        )
    return tuple(names[key] for key in selected)


def with_junctions(spec: ModelSpec, select_modules: JunctionSelector, options: Mapping[str, Any]) -> ModelSpec:
    """Return a copy of ``spec`` whose model has junctions.

    The inputs of every module that ``select_modules(model, options)`` returns pass through a junction.
    """
    return replace(spec, build=JunctionModelBuilder(spec.build, select_modules, options))
