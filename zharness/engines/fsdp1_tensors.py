"""Read layout and memory of FSDP1 from its private attributes, hide its wrappers from names, and sum its gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.ddp import multiply_by_world_size
from zharness.engines.fsdp2_memory import storage_bytes
from zharness.engines.protocol import Piece, Resources

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_WRAPPER = re.compile(r"(^|\.)_fsdp_wrapped_module(?=\.|$)")
_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


def original_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that the wrappers of FSDP1 add."""
    return _WRAPPER.sub("", name).removeprefix(".")


def keep_original_names(model: nn.Module) -> None:
    """Make ``model`` list its modules, parameters and buffers under their original names.

    FSDP1 replaces a submodule ``first`` by a wrapper, so that ``first.weight`` becomes
    ``first._fsdp_wrapped_module.weight``. This function replaces the model's class by a subclass, as FSDP2 does.
    """
    original: Any = type(model)

    def named_modules(
        self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules under original names. A wrapper has the name of the module inside it and precedes it."""
        for name, module in original.named_modules(self, memo, prefix, remove_duplicate):
            yield prefix + _WRAPPER.sub("", name[len(prefix) :]), module

    model.__class__ = type(original.__name__, (original,), {"named_modules": named_modules})


def unwrap(model: nn.Module) -> None:
    """Replace each FSDP1 wrapper in ``model`` by the module that it wraps, and restore the class of ``model``.

    At stages 2 and 3 the parameters remain sharded.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FullyShardedDataParallel):
                setattr(module, name, child.module)
    model.__class__ = type(model).__bases__[0]


def iter_flat_params(wrapped: FullyShardedDataParallel) -> Iterator[tuple[Any, Any]]:
    """Yield the FlatParamHandle and the FlatParameter of each group of ``wrapped`` that has parameters."""
    for instance in type(wrapped).fsdp_modules(wrapped):
        handle = instance._handle
        if handle is not None:
            yield handle, handle.flat_param


def flat_layout(wrapped: FullyShardedDataParallel, params: Mapping[str, nn.Parameter]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each sharded parameter that the ranks own; replicated parameters are left out.

    This is a collective.
    """
    names = {id(param): name for name, param in params.items()}
    own: dict[str, tuple[int, int]] = {}
    for handle, flat_param in iter_flat_params(wrapped):
        if handle.uses_sharded_strategy:
            for param, info in zip(flat_param._params, flat_param._shard_param_infos, strict=True):
                start, stop = info.intra_param_start_idx, info.intra_param_end_idx
                own[names[id(param)]] = (start, stop + 1) if info.in_shard else (0, 0)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {
        name: tuple(Piece(rank, *edges[name]) for rank, edges in enumerate(gathered) if edges[name][0] < edges[name][1])
        for name in own
    }


def measure_resources(
    wrapped: FullyShardedDataParallel, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Resources:
    """Return the number of bytes in this rank's storages.

    A storage that tensors share is counted once, and a freed storage counts as 0 bytes.
    """
    flat = [flat_param for _, flat_param in iter_flat_params(wrapped)]
    gathered = [getattr(param, name, None) for param in flat for name in _GATHERED]
    unreduced = [tensor for param in flat for tensor in (param.grad, getattr(param, "_saved_grad_shard", None))]
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return Resources(
        parameters=storage_bytes([*params.values(), *flat, *(tensor for tensor in gathered if tensor is not None)]),
        gradients=storage_bytes(
            [*(p.grad for p in params.values() if p.grad is not None), *(t for t in unreduced if t is not None)]
        ),
        optimizer_state=storage_bytes(states),
    )


def sum_gradients(wrapped: FullyShardedDataParallel, replicated: bool) -> None:
    """Make ``wrapped`` sum gradients over ranks instead of averaging them.

    If gradients are sharded without replicas, a communication hook computes the sum. Otherwise each gradient is
    multiplied by the world size before FSDP averages it. Without shards, FSDP reduces the earlier gradients of an
    accumulation window again, which changes a sum but not a mean. With replicas, FSDP refuses communication hooks. If
    the caller runs a module outside of FSDP's forward, the parameter itself gets the gradient, so it has a hook, too.
    """
    if all(handle.uses_sharded_strategy for handle, _ in iter_flat_params(wrapped)) and not replicated:
        wrapped.register_comm_hook(None, reduce_by_sum)
        return
    for _, flat_param in iter_flat_params(wrapped):
        for tensor in (flat_param, *flat_param._params):
            if tensor.requires_grad:
                tensor.register_hook(multiply_by_world_size)


def reduce_by_sum(_state: None, gradient: Tensor, shard: Tensor) -> None:
    """Sum ``gradient`` over ranks and write this rank's part of the sum into ``shard`` (a reduce-scatter)."""
    dist.reduce_scatter_tensor(shard, gradient)
