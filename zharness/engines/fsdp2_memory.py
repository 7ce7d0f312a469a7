"""Count the bytes that FSDP2 allocated on this rank: shards, unsharded weights, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Resources
from zharness.engines.torch_access import local_tensor


def measure_resources(
    sharded: Iterable[Any], params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Resources:
    """Return the bytes of all storages on this rank, counting a shared storage once and a freed one not at all.

    ``sharded`` has the modules to which ``fully_shard`` was applied. Their unsharded weights and unreduced gradients
    are read from private attributes, as torch has no public function for them.
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
    """Yield the ``FSDPParam`` of each parameter that ``module`` gathers.

    Newer releases of torch keep a list of parameter groups for each module; older releases keep one group or None.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        yield from group.fsdp_params if group is not None else ()


def unreduced_gradients(param: Any) -> Iterator[Tensor]:
    """Yield the gradients of an unsharded weight that were not reduced yet."""
    weight = getattr(param, "_unsharded_param", None)  # not set before the first all-gather
    for tensor in (param.unsharded_accumulated_grad, None if weight is None else weight.grad):
        if tensor is not None:
            yield tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors`` on this rank, including padding."""
    storages = (local_tensor(tensor.detach()).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
