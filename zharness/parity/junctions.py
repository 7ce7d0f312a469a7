"""Nodes that an engine puts into autograd's graph, put into the baseline's as well.

A node around a module computes nothing. But where two uses of one tensor lie behind it, their gradients are added to
each other before they meet those of uses elsewhere, and of three numbers (a + b) + c is not always a + (b + c). Both
are right; with the same nodes plain PyTorch gives the same one. No wrong number is hidden by that: whatever is put
where, the baseline's gradients are those of its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # as FSDP2 walks over what a module is called with

from zharness.workload import ModelSpec

Choose = Callable[[nn.Module], Sequence[nn.Module]]


class Junction(torch.autograd.Function):
    """The tensors themselves; their gradients come to it before they go on."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def joined(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook: all inputs that require a gradient go through one node."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places and torch.is_grad_enabled():
        passed = Junction.apply(*[leaves[place] for place in places])  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, tree)


def with_junctions(spec: ModelSpec, choose: Choose) -> ModelSpec:
    """``spec`` with a node at the inputs of every module that ``choose`` names of its model."""

    def build() -> nn.Module:
        model = spec.build()
        for module in choose(model):
            module.register_forward_pre_hook(joined, with_kwargs=True)
        return model

    return replace(spec, build=build)
