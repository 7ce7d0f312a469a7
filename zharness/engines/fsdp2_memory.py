"""The bytes that FSDP2 holds on this rank: its shards, what it gathered of them, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Resources


def measure_resources(
    sharded: Iterable[Any], params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Resources:
    """Bytes of all storages on this rank; one that several tensors share counts once, a freed one nothing.

    ``sharded`` are the modules that ``fully_shard`` was applied to. What they have gathered, and the gradients on it,
    no public function of torch shows.
    """
    groups = [param for module in sharded for param in iter_fsdp_params(module)]
    gathered = [tensor for param in groups for tensor in param.all_gather_outputs]
    unreduced = [tensor for param in groups for tensor in unreduced_gradients(param)]
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return Resources(
        parameters=storage_bytes([*params.values(), *gathered]),
        gradients=storage_bytes([*(p.grad for p in params.values() if p.grad is not None), *unreduced]),
        optimizer_state=storage_bytes(states),
    )


def iter_fsdp_params(module: Any) -> Iterator[Any]:
    """FSDP2's own record of each parameter that ``module`` gathers. Older releases of torch have one group at most."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if several is None else several:
        yield from group.fsdp_params if group is not None else ()


def unreduced_gradients(param: Any) -> Iterator[Tensor]:
    """Gradients on a gathered weight, which are not reduced yet."""
    whole = getattr(param, "_unsharded_param", None)  # not there before it was first gathered
    for tensor in (param.unsharded_accumulated_grad, None if whole is None else whole.grad):
        if tensor is not None:
            yield tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors`` on this rank, padding included."""
    storages = (local_tensor(tensor.detach()).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
