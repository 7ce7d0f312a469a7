"""Stand in for ``deepspeed.utils``' functions that read and replace the tensors of one Parameter, ``safe_get_*`` etc.

The full forms are collectives. As in DeepSpeed, a frozen Parameter and one without an engine have none of these
tensors: reading returns None, and replacing does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zharness.compat.deepspeed_engine.parameters import find_parameter
from zharness.errors import UsageError
from zharness.reference.inspection.tensor_access import TensorAccess

_ACCESS = "ds_access"


@dataclass(frozen=True)
class ParamAccess:
    """The tensors of one Parameter: its name in the engine, and the reader of that engine."""

    name: str
    tensors: TensorAccess

    def has_gradient(self) -> bool:
        """Return whether any rank has a gradient of the Parameter. This is a collective."""
        return self.tensors.full_grad(self.name) is not None


def attach_access(parameter: nn.Parameter, name: str, tensors: TensorAccess) -> None:
    """Make the functions of this file find ``parameter``."""
    setattr(parameter, _ACCESS, ParamAccess(name, tensors))


def detach_access(parameter: nn.Parameter) -> None:
    """Make the functions of this file forget ``parameter``."""
    parameter.__dict__.pop(_ACCESS, None)


def _find(parameter: Any) -> ParamAccess | None:
    """Return the tensors of a trained Parameter of an engine, or None. Raises UsageError for any other tensor."""
    found = find_parameter(parameter)
    if not isinstance(found, nn.Parameter):
        raise UsageError(f"got a {type(parameter).__name__} that is no Parameter; take one of model.parameters()")
    return getattr(found, _ACCESS, None) if found.requires_grad else None


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the full master weight, or the weight if there is no master."""
    access = _find(param)
    return access.tensors.full_param(access.name) if access else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full reduced gradient, or None if no rank has one."""
    access = _find(param)
    return access.tensors.full_grad(access.name) if access else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the full entry of the optimizer's state, or None before the first step."""
    access = _find(param)
    return access.tensors.full_state(access.name, optim_state_key) if access else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the master weight and the weight."""
    if access := _find(param):
        access.tensors.set_full_param(access.name, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the reduced gradient."""
    if access := _find(param):
        access.tensors.set_full_grad(access.name, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace the entry of the optimizer's state."""
    if access := _find(param):
        access.tensors.set_full_state(access.name, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor | None, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by ``update_func(gradient, parameter)``."""
    for param in param_list:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the master weight."""
    access = _find(param)
    return access.tensors.local_param(access.name) if access else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the reduced gradient, or None if no rank has one. This is a collective."""
    access = _find(param)
    return access.tensors.local_grad(access.name) if access and access.has_gradient() else None


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of the entry of the optimizer's state."""
    access = _find(param)
    return access.tensors.local_state(access.name, optim_state_key) if access else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the master weight. This is a collective."""
    if access := _find(param):
        access.tensors.set_local_param(access.name, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the reduced gradient. This is a collective."""
    if access := _find(param):
        access.tensors.set_local_grad(access.name, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of the entry of the optimizer's state."""
    if access := _find(param):
        access.tensors.set_local_state(access.name, optim_state_key, value)
