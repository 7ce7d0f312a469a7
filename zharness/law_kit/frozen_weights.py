"""Freeze weights of a model, and leave their gradients out of plain PyTorch's results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from zharness.parity.baseline import LocalResult


def freeze(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Freeze the parameters ``names`` of ``model``, let all others require a gradient, and return the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def leave_out_grads(local: LocalResult, names: Collection[str]) -> LocalResult:
    """Return a result without the gradients of the weights ``names``."""
    return replace(local, grads={name: grad for name, grad in local.grads.items() if name not in names})
