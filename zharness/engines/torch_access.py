"""Read and write gradients, weights and optimizer state of torch's engines by torch's own public functions.

Tensors are full tensors or DTensors (``DTensor.full_tensor``, ``distribute_tensor``). With the option
``tensor_access: state_dict`` of FSDP2, weights and optimizer state are read and written by the functions of
``torch.distributed.checkpoint.state_dict`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zharness.engines.loss_scaling import LossScaler
from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.engines.torch_engine import EngineAdapter

TENSOR_ACCESS = "tensor_access"
BY_STATE_DICT = "state_dict"


class TorchTensorAccess:
    """The methods of SupportsReadOut, SupportsWriteIn and SupportsShardAccess of torch's engines."""

    module: nn.Module
    _adapter: EngineAdapter
    _optimizer: torch.optim.Optimizer
    _scaler: LossScaler
    _reads_state_dicts: bool

    def read_grad(self, name: str) -> Tensor | None:
        grad = self._adapter.params[name].grad
        return None if grad is None else self._scaler.unscale(self._full_copy(grad))

    def read_param(self, name: str) -> Tensor:
        return self._full_copy(self._model_state_dict()[name] if self._reads_state_dicts else self._param(name))

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        states = self._optimizer_state_dict()["state"] if self._reads_state_dicts else self._state_by_parameter()
        state = states.get(name, {})
        return self._full_copy(state[key]) if state else None

    def write_grad(self, name: str, value: Tensor) -> None:
        param = self._adapter.params[name]
        if param.grad is None:  # no micro-batch of the step used the weight
            param.grad = torch.zeros_like(param)
        copy_into(self._grad(name), self._scaler.rescale(value))

    def write_param(self, name: str, value: Tensor) -> None:
        if not self._reads_state_dicts:
            copy_into(self._param(name), value)
            return
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self.module, {name: value}, options=_full_state_dict_options(strict=False))

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        if not self._reads_state_dicts:
            copy_into(self._optimizer.state[self._param(name)][key], value)
            return
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        state_dict = self._optimizer_state_dict()
        # The optimizer keeps the loaded tensor for a plain parameter, so give it a copy of the caller's tensor.
        state_dict["state"][name][key] = value.clone()
        set_optimizer_state_dict(self.module, self._optimizer, state_dict, options=_full_state_dict_options())

    def read_grad_shard(self, name: str) -> Tensor:
        return self._scaler.unscale(copy_shard(reduce_partial_sums(self._grad(name))))

    def read_param_shard(self, name: str) -> Tensor:
        return copy_shard(self._param(name))

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        return copy_shard(self._optimizer.state[self._param(name)][key])

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        param = self._adapter.params[name]
        # If the value were written into a rank's partial sum, the partial sums of other ranks would be added to it.
        param.grad = reduce_partial_sums(self._grad(name))
        copy_into_shard(param.grad, self._scaler.rescale(value))

    def write_param_shard(self, name: str, value: Tensor) -> None:
        copy_into_shard(self._param(name), value)

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        copy_into_shard(self._optimizer.state[self._param(name)][key], value)

    def _full_copy(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def _param(self, name: str) -> Tensor:
        """Return the parameter that the optimizer updates, without its graph."""
        return self._adapter.params[name]

    def _grad(self, name: str) -> Tensor:
        """Return the gradient of a parameter. Raises UsageError if it has none."""
        grad = self._adapter.params[name].grad
        if grad is None:
            raise UsageError(f"parameter {name!r} has no gradient")
        return grad

    def _state_by_parameter(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the optimizer's state by parameter name."""
        return self._adapter.optimizer_states(self._optimizer, self._adapter.params)

    def _model_state_dict(self) -> Mapping[str, Any]:
        """Return the full state dict of the module."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(self.module, options=_full_state_dict_options())

    def _optimizer_state_dict(self) -> dict[str, Any]:
        """Return the full state dict of the optimizer, by parameter name."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(self.module, self._optimizer, options=_full_state_dict_options())


def _full_state_dict_options(strict: bool = True) -> Any:
    """Return the options with which state dicts have full tensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, strict=strict)


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy the full tensor ``value`` into ``target``, which may be a DTensor. This is a collective for a DTensor."""
    from zharness.distributed_tensor import DTensor, distribute_tensor

    local = value.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        # Each rank cuts its part from its own copy of the value. If rank 0 sent the parts, a split over two axes would
        # have to be even.
        parts = distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(parts)
    else:
        target.copy_(local)


def reduce_partial_sums(tensor: Tensor) -> Tensor:
    """Return a DTensor of partial sums with the sums on every rank (collective), or any other tensor unchanged.

    Sequence parallelism leaves the gradient of a norm's weight as partial sums, which torch's optimizers reduce.
    """
    from zharness.distributed_tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=whole)


def copy_shard(tensor: Tensor) -> Tensor:
    """Return a flat copy on CPU of this rank's part of ``tensor``, which is all of it unless it is a DTensor."""
    return local_tensor(tensor).detach().flatten().to("cpu", copy=True)


@torch.no_grad()
def copy_into_shard(target: Tensor, value: Tensor) -> None:
    """Copy a flat tensor into this rank's part of ``target``."""
    local = local_tensor(target)
    local.copy_(value.reshape(local.shape))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or any other tensor unchanged."""
    from zharness.distributed_tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
