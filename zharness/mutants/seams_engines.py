"""Define how mutants change private parts of torch, its optimizers, and the adapters of torch's engines and DeepSpeed.

The functions ``optimizer`` and ``schedule`` also accept the reference engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from zharness.engines import Piece
from zharness.engines.deepspeed import DeepSpeedEngine
from zharness.engines.deepspeed_pp import DeepSpeedPipelineEngine
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.engines.torch_pp import PipelineEngine
from zharness.reference.client.meta_init import DeferredModule, find_deferred_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zharness.mesh import Mesh

SEQUENCE_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
SyncParamGroups: TypeAlias = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]


# TorchEngine


def params(engine: TorchEngine) -> Mapping[str, nn.Parameter]:
    """Return the engine's parameters, by name; FSDP2's are DTensors."""
    return engine._adapter.params


def optimizer(engine: TorchEngine | ReferenceEngine) -> Any:
    """Return the optimizer that the engine exposes."""
    return engine.engine.optimizer if isinstance(engine, ReferenceEngine) else engine._optimizer


def schedule(engine: TorchEngine | ReferenceEngine) -> Any:
    """Return the learning-rate schedule."""
    return engine.engine.schedule if isinstance(engine, ReferenceEngine) else engine._schedule


def set_schedule(engine: TorchEngine, value: Any) -> None:
    """Set the learning-rate schedule."""
    engine._schedule = value


def clip_limit(engine: TorchEngine) -> float | None:
    """Return the norm to which gradients are clipped."""
    return engine._clip


def set_clip_limit(engine: TorchEngine, limit: float | None) -> None:
    """Set the norm to which gradients are clipped."""
    engine._clip = limit


@contextmanager
def without_clipping(engine: TorchEngine) -> Iterator[None]:
    """Disable clipping in ``step`` inside the block."""
    limit, engine._clip = engine._clip, None
    try:
        yield
    finally:
        engine._clip = limit


def set_grad_norm(engine: TorchEngine, norm: float) -> None:
    """Set the gradient norm that the engine reports."""
    engine._last_grad_norm = norm


def full_tensor(engine: TorchEngine, tensor: Tensor) -> Tensor:
    """Return the full tensor of a shard. This is a collective if the engine shards tensors."""
    return engine._adapter.full_tensors([tensor])[0]


def reset_window(engine: TorchEngine) -> None:
    """Begin a new accumulation window by resetting the count of its micro-batches to 0."""
    engine._micro_batches_counted = 0


def autocast(engine: TorchEngine) -> AbstractContextManager[Any]:
    """Return the autocast context of the engine's forwards."""
    return engine._autocast()


def wrap_autocast(
    engine: TorchEngine,
    wrap: Callable[[Callable[[], AbstractContextManager[Any]]], Callable[[], AbstractContextManager[Any]]],
) -> None:
    """Apply the decorator ``wrap`` to the function that makes the autocast context of a forward."""
    engine._autocast = wrap(engine._autocast)


def call_forward(engine: TorchEngine, *args: Any, **kwargs: Any) -> Any:
    """Call the wrapped model, without the engine's autocast."""
    return engine._adapter.forward(*args, **kwargs)


def wrap_forward(engine: TorchEngine, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Apply the decorator ``wrap`` to the function that calls the model."""
    engine._adapter = replace(engine._adapter, forward=wrap(engine._adapter.forward))


def replace_no_sync(engine: TorchEngine, no_sync: Callable[[], AbstractContextManager[Any]]) -> None:
    """Replace the context manager in which gradients are not reduced."""
    engine._adapter = replace(engine._adapter, no_sync=no_sync)


def drop_gradients(engine: TorchEngine) -> None:
    """Drop the gradients that are not in ``grad`` of the engine's parameters."""
    engine._adapter.drop_gradients()


def wrap_drop_gradients(engine: TorchEngine, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that drops gradients outside the engine's parameters."""
    engine._adapter = replace(engine._adapter, drop_gradients=wrap(engine._adapter.drop_gradients))


def replace_layout(engine: TorchEngine, layout: Mapping[str, tuple[Piece, ...]]) -> None:
    """Replace the layout that the engine reports."""
    engine._adapter = replace(engine._adapter, layout=layout)


# DDP


def ddp_wrapper(engine: TorchEngine) -> Any:
    """Return the engine's DistributedDataParallel."""
    return engine._adapter.forward.__self__  # type: ignore[attr-defined]


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Make DistributedDataParallel ignore the parameters ``names`` of ``model``."""
    replaced: Any = model
    replaced._ddp_params_and_buffers_to_ignore = list(names)


# FSDP2


def fsdp2_reset_reduced(drop_gradients: Callable[[], None]) -> Callable[[], None]:
    """Return the part of FSDP2's ``drop_gradients`` that drops only reduced gradients."""
    both: Any = drop_gradients
    reset: Callable[[], None] = both.args[0]
    return reset


def fsdp2_sync(engine: TorchEngine) -> Any:
    """Return the object that enables and disables FSDP2's gradient reduction."""
    return engine._adapter.no_sync.__self__  # type: ignore[attr-defined]


@contextmanager
def reordered_device_mesh(engine: ModuleType, order: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make the adapter module ``engine`` reorder the ranks of its DeviceMesh by ``order``, inside the block."""
    names = vars(engine)
    original = names["build_device_mesh"]

    def build(mesh: Mesh, device: torch.device) -> DeviceMesh:
        devices: DeviceMesh = original(mesh, device)
        return type(devices)(devices.device_type, order(devices.mesh), mesh_dim_names=devices.mesh_dim_names)

    names["build_device_mesh"] = build
    try:
        yield
    finally:
        names["build_device_mesh"] = original


def transpose_ranks(ranks: Tensor) -> Tensor:
    """Return the ranks of a mesh in an order in which neighbouring ranks lie along the first axis, not the last."""
    return ranks.transpose(0, -1).reshape(ranks.shape)


def has_unreduced(sync: Any) -> bool:
    """Return whether a ``no_sync`` block has left gradients on the unsharded weights."""
    return bool(sync._unreduced_count)


def set_gradient_sync(sync: Any, *, enabled: bool) -> None:
    """Switch the reduction of gradients on or off, as ``no_sync`` does at its end and at its beginning."""
    sync._unreduced_count += not enabled
    sync._set_gradient_sync(enabled)


def fsdp2_param_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the FSDPParamGroup of every module that has one."""
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    for module in sharded:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield group


def zero_unreduced(model: nn.Module) -> None:
    """Fill the gradients that ``no_sync`` blocks have left on unsharded weights with zeros."""
    for param in (param for group in fsdp2_param_groups(model) for param in group.fsdp_params):
        for grad in (param.unsharded_accumulated_grad, getattr(param, "_unsharded_param", None)):
            tensor = grad.grad if isinstance(grad, nn.Parameter) else grad
            if tensor is not None:
                tensor.zero_()


# ZeroRedundancyOptimizer


def wrap_sync_param_groups(engine: TorchEngine, wrap: Callable[[SyncParamGroups], SyncParamGroups]) -> None:
    """Apply the decorator ``wrap`` to the function that copies settings from the exposed optimizer to the local one."""
    exposed = optimizer(engine)
    exposed._sync_param_groups = wrap(exposed._sync_param_groups)


# torch


def versions(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """Return the version counters by which autograd notices in-place changes."""
    return tuple(parameter._version for parameter in parameters)


def set_versions(parameters: Sequence[nn.Parameter], values: Sequence[int]) -> None:
    """Set version counters, which hides in-place changes from autograd."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(values))


def sparse_entries(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor; indices may occur several times."""
    return gradient._indices(), gradient._values()


def forward_hooks(module: nn.Module) -> MutableMapping[Any, Any]:
    """Return the module's own table of forward hooks."""
    return module._forward_hooks


def in_backward() -> int:
    """Return the id of the running backward, or -1 outside a backward."""
    return torch._C._current_graph_task_id()


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the forward hooks of ``module`` itself inside the block."""
    hooks = dict(module._forward_hooks)
    module._forward_hooks.clear()
    try:
        yield
    finally:
        module._forward_hooks.update(hooks)


# Pipelines


def replace_end_of_batch(engine: PipelineEngine, end: Callable[[], None]) -> None:
    """Replace the function that sums the gradients of the copies of tied weights after a batch."""
    vars(engine._tied)["end_batch"] = end


def wrap_end_of_batch(engine: PipelineEngine, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that sums the gradients of tied weights' copies after a batch."""
    replace_end_of_batch(engine, wrap(engine._tied.end_batch))


def keep_tied_gradients(engine: PipelineEngine) -> None:
    """Make tied weights keep their gradients of earlier batches, which are already summed, when a batch begins."""
    tied = engine._tied
    vars(tied)["begin_batch"] = lambda: vars(tied).update(_earlier_grads=dict.fromkeys(tied._owners))


def stage_schedule(engine: PipelineEngine) -> Any:
    """Return the learning-rate schedule of this rank's stages."""
    return engine._lr_schedule


def sum_one_weight_of_tied_layers(engine: DeepSpeedPipelineEngine) -> None:
    """Make DeepSpeed sum only the first weight's gradient of each tied layer over the stages of the layer."""
    module = engine._engine.module
    original = module.get_tied_weights_and_groups

    def first_of_each() -> list[Any]:
        return list({id(group): (weight, group) for weight, group in reversed(original())}.values())

    module.get_tied_weights_and_groups = first_of_each


def stage_params(engine: PipelineEngine) -> Mapping[str, nn.Parameter]:
    """Return the parameters of this rank's stages, by their names in the model."""
    return engine._params


def stage_modules(engine: PipelineEngine) -> Iterable[nn.Module]:
    """Return this rank's stages, wrapped in DDP or not."""
    return engine._parts.values()


def deferred_modules(model: nn.Module) -> list[DeferredModule]:
    """Return the modules of ``model`` with tensors on the meta device, which the reference engine materializes."""
    return find_deferred_modules(model)


# DeepSpeedEngine, with sequence parallelism or experts


def count_sequence_ranks_as_data(engine: DeepSpeedEngine) -> None:
    """Make DeepSpeed divide gradients by the number of all ranks over which DeepSpeed sums them."""
    for owner in (engine._engine, engine._engine.optimizer):
        owner.sequence_parallel_size = 1


def set_sequence_data_group(group: Any) -> None:
    """Make DeepSpeed reduce gradients over the ranks of ``group``."""
    importlib.import_module(SEQUENCE_STATE)._SEQUENCE_DATA_PARALLEL_GROUP = group  # type: ignore[attr-defined]


def sequence_group() -> Any:
    """Return the process group of the ranks that split this rank's sequence."""
    return importlib.import_module(SEQUENCE_STATE).get_sequence_parallel_group()


def deepspeed_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return the optimizer that DeepSpeed has at stage 0."""
    found: torch.optim.Optimizer = engine._engine.optimizer
    return found


def autocast_scaler(engine: DeepSpeedEngine) -> Any:
    """Return the torch.amp.GradScaler of this rank under torch_autocast in fp16 above stage 0, or None."""
    return getattr(engine._engine.optimizer, "torch_autocast_gradscaler", None)


def partitioned_state(engine: DeepSpeedEngine) -> list[Any]:
    """Return the optimizer state of each partition that this rank has above ZeRO's stage 0."""
    return list(engine._engine.optimizer.optimizer.state.values())


def wrap_global_norm(engine: DeepSpeedEngine, wrap: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]) -> None:
    """Apply the decorator ``wrap`` to the function that computes the norm of ZeRO's stages 1 and 2."""
    engine._engine.optimizer.scaled_global_norm = wrap(engine._engine.optimizer.scaled_global_norm)


def round_expert_masters(engine: DeepSpeedEngine) -> None:
    """Round the fp32 weights of experts to bf16, at ZeRO's stages 1 and 2."""
    zero = engine._engine.optimizer
    for index, is_expert in enumerate(zero.is_moe_param_group):
        if is_expert:
            master = zero.single_partition_of_fp32_groups[index].data
            master.copy_(master.bfloat16())


def round_masters(engine: DeepSpeedEngine) -> None:
    """Round the fp32 weights to bf16, at ZeRO's stages 1 and 2."""
    for master in engine._engine.optimizer.single_partition_of_fp32_groups:
        master.data.copy_(master.data.bfloat16())


def scale_expert_gradients(engine: DeepSpeedEngine, factor: Tensor) -> None:
    """Multiply the reduced gradients of experts by ``factor``, at ZeRO's stages 1 and 2."""
    zero = engine._engine.optimizer
    for index, is_expert in enumerate(zero.is_moe_param_group):
        for grad in zero.averaged_gradients[index] if is_expert else ():
            grad.mul_(factor)


def step_deepspeed_schedule(engine: DeepSpeedEngine) -> None:
    """Step the learning-rate schedule once."""
    engine._engine.lr_scheduler.step()


def replace_join(engine: DeepSpeedEngine, join: Callable[[Tensor, Any], Tensor]) -> None:
    """Replace the function that joins the parts of the output over the ranks of a group."""
    if engine._sequence_parts is not None:
        engine._sequence_parts = replace(engine._sequence_parts, join=join)
