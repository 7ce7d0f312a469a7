"""Nodes that an engine puts into autograd's graph, put into the baseline's as well.

A node around a module computes nothing. But where two uses of one tensor lie behind it, their gradients are added to
each other before they meet those of uses elsewhere, and of three numbers (a + b) + c is not always a + (b + c). Both
are right; with the same nodes plain PyTorch gives the same one. No wrong number is hidden by that: whatever is put
where, the baseline's gradients are those of its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # as FSDP2 walks over what a module is called with

from zharness.errors import EngineContractError
from zharness.workload import ModelSpec

JunctionSelector = Callable[[nn.Module, Mapping[str, Any]], Sequence[nn.Module]]  # of a model and the engine's options


class Junction(torch.autograd.Function):
    """The tensors themselves; their gradients come to it before they go on."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def insert_junction(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook: all inputs that require a gradient go through one node."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places and torch.is_grad_enabled():
        passed = Junction.apply(*[leaves[place] for place in places])  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, tree)


@dataclass(frozen=True)
class JunctionModelBuilder:
    """Builds a model with nodes in it. Two of the same are equal: what is kept for a spec is found again."""

    build: Callable[[], nn.Module]
    select_modules: JunctionSelector
    options: Mapping[str, Any] = field(hash=False)

    def __call__(self) -> nn.Module:
        model = self.build()
        for name in junction_module_names(self):
            model.get_submodule(name).register_forward_pre_hook(insert_junction, with_kwargs=True)
        return model


@cache
def junction_module_names(builder: JunctionModelBuilder) -> tuple[str, ...]:
    """The names of the modules that ``of.choose`` picks.

    It is the engine's own function, run for what the engine is held against; so it is shown a model of its own, and
    whatever it does to that one, plain PyTorch's stays plain. Raises EngineContractError where it picks anything else
    than modules of the model that it was shown, or one of them twice.
    """
    with torch.random.fork_rng(devices=[]):  # the model that is hooked begins with the weights of the caller's seed
        shown = builder.build()
    names = {id(module): name for name, module in shown.named_modules()}
    modules = builder.select_modules(shown, builder.options)
    places = [id(module) for module in modules]
    if not names.keys() >= {*places} or len({*places}) < len(places):
        raise EngineContractError(
            f"junctions: got {len(modules)} modules ({', '.join(type(module).__name__ for module in modules)}); "
            "expected modules of the model that it was given, each once"
        )
    return tuple(names[place] for place in places)


def with_junctions(spec: ModelSpec, select_modules: JunctionSelector, options: Mapping[str, Any]) -> ModelSpec:
    """``spec`` with a node at the inputs of every module that ``choose`` names of its model under ``options``."""
    return replace(spec, build=JunctionModelBuilder(spec.build, select_modules, options))
