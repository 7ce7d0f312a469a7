"""Adapt Megatron-FSDP to the Engine protocol: stage 0 (``no_shard``) and stage 3 (``optim_grads_params``).

The calls are those of its documentation: ``fully_shard_model``, ``fully_shard_optimizer``, and ``step`` and
``zero_grad`` of the optimizer. The axis dp_replicate is its outer data parallelism (HSDP). On a CPU, Megatron-FSDP gets
stand-ins for ``torch.cuda`` (``megatron_cuda``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.comm import Comm, all_gather_objects, is_true_on_any_rank
from zharness.engines import optimizers
from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.fsdp_groups import GROUPING_OPTIONS, LEAF, select_group_modules
from zharness.engines.megatron_checkpoint import has_optimizer_state
from zharness.engines.megatron_cuda import STAND_INS
from zharness.engines.megatron_shards import copy_own_part, find_pieces, gather, own_part, write_own_part
from zharness.engines.protocol import Capabilities, EngineConfig, EngineOption, Feature, OptimizerSpec, Reduction
from zharness.engines.torch_access import local_tensor
from zharness.engines.torch_checkpoint import FOLDER_NAME, read_state, write_state
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    identity,
    snapshot,
    validate_config,
)
from zharness.mesh import DATA_SHARD, REPLICATE, TENSOR, Mesh

README = "https://pypi.org/project/megatron-fsdp/0.6.1/"
_DISTRIBUTED = "from the end of a backward to the next forward the weights are DTensors, which do not mix with tensors"
REFUSES: dict[Feature, str] = {
    **TORCH_REFUSES,
    Feature.ENGINE_ACCUMULATION: "it leaves the end of a window, and the division by its length, to the caller",
    Feature.NO_GRADIENT: "a weight that no loss used has the zeros of the gradient buffer",
    Feature.UNFREEZING: "its constructor makes gradient buffers only for weights that then require a gradient",
    Feature.SPARSE_GRADIENTS: "it copies gradients into one buffer, and copy_ takes no sparse tensor",
    Feature.UNEVEN_RANKS: "a bucket is reduced once all of its weights have a gradient, which every rank has to reach",
    Feature.EDITS: "all ranks have to edit a weight, which is a DTensor, together",
    Feature.IN_PLACE_EDITS: "a forward uses copies, which it makes of the optimizer's weights after a step",
    Feature.DEFERRED: "each rank fills a model on the meta device by reset_parameters, and not with the same weights",
    Feature.RESOURCES: "it does not count the bytes that it allocates",
    Feature.RANK_BUFFERS: "torch.distributed.checkpoint saves a tensor that is not a DTensor once for all ranks",
    Feature.STEADINESS: "the process groups of its device mesh live until destroy_process_group",
    **dict.fromkeys(
        (Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS),
        "each rank shards the values of its own model; the caller has to call broadcast_params",
    ),
    **dict.fromkeys((Feature.OUTSIDE_FORWARD, Feature.SUBMODULES), _DISTRIBUTED),
    **dict.fromkeys(
        (Feature.TORCH_FUNC, Feature.TRANSFORMS),
        "its hooks write gradients in place into buffers, and torch.func refuses to write to a captured tensor",
    ),
}
STAGE_0_REFUSES: dict[Feature, str] = {
    Feature.SUM: (
        "with several backwards the gradients of the first one are reduced twice: gradients 'are all-reduced directly "
        "into the gradient accumulation buffer', which 'should not be all-reduced more than once per optimization "
        f"cycle' ({README})"
    ),
}
READS_FREED = "its forward reads the weight of a unit by attribute, after the unit has freed it"
STAGE_3_REFUSES: dict[Feature, str] = {
    Feature.OWN_WEIGHT_GRADIENTS: (
        "'FSDP unit module parameters can be \"safely\" deallocated after the forward() or backward()' of a module"
    ),
    Feature.RETAIN_GRAPH: "the hooks of a second backward find the DTensors that the end of the first one has left",
    Feature.NO_SYNC: "'For grads shard mode there will actually always be gradient sync happening' (no_sync)",
    Feature.CLIP: (
        "a rank whose part of a weight is empty has no gradient of it, so that torch's clip_grad_norm_ calls other "
        "collectives on this rank than on the other ranks; Megatron-FSDP has no function of its own for clipping"
    ),
}
REPLICATE_REFUSES: dict[Feature, str] = {
    **dict.fromkeys(
        (Feature.CALLER_ACCUMULATION, Feature.SUM),
        "'optimizer.zero_grad()' must be invoked 'every forward-backward optimization cycle to prevent successive "
        "in-place gradient buffer reductions from corrupting previously accumulated gradients' (set_model_auto_sync, "
        "on HSDP)",
    ),
    Feature.RESHARD: "the only other stage, 0, cannot step with an outer axis (_get_fsdp_tensor_spec)",
}
KEEP_FIRST_STEP = "keep_first_step"
VARIANTS = {
    "first_step_kept": EngineOption(
        {KEEP_FIRST_STEP: True},
        changes_numbers="the optimizer has made the step on zero gradients of fully_shard_optimizer",
        laws=frozenset({"training.optimizer_options-adamw_amsgrad"}),
        laws_reason="nearly every law of optimizers fails because of that step, and this law names the step",
    ),
}
OPTIONS = {
    **GROUPING_OPTIONS,
    KEEP_FIRST_STEP: "keep the step on zero gradients that fully_shard_optimizer makes, as it does; default false",
    **AUTOCAST_OPTION,
}
CAPABILITIES = Capabilities(
    stages=frozenset({0, 3}),
    refuses=REFUSES,
    variants=VARIANTS,
    mesh_axes=frozenset({REPLICATE}),
    refuses_on={REPLICATE: REPLICATE_REFUSES},
)


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that Megatron-FSDP refuses at ``stage``."""
    if stage == 0:
        # With an outer axis a step raises: _get_fsdp_tensor_spec gives a whole weight one placement on two axes.
        return replace(
            CAPABILITIES,
            refuses={**REFUSES, **STAGE_0_REFUSES},
            scaled_sum=STAGE_0_REFUSES[Feature.SUM],
            mesh_axes=frozenset(),
        )
    models = dict.fromkeys(("fused", "changing"), READS_FREED)
    return replace(CAPABILITIES, refuses={**REFUSES, **STAGE_3_REFUSES}, refuses_models=models)


def unit_classes(model: nn.Module, options: Mapping[str, Any]) -> list[type[nn.Module]]:
    """Return the classes of the modules that Megatron-FSDP shards as units; it takes classes, not modules."""
    modules = select_group_modules(model, str(options.get("grouping", LEAF)), options.get("in_root", ())) or [model]
    return list(dict.fromkeys(type(module) for module in modules))


def warm_up() -> None:
    """Import Megatron-FSDP before ranks are forked."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that Transformer Engine is not installed
        import megatron_fsdp  # noqa: F401


def factory(model: nn.Module, config: EngineConfig) -> MegatronEngine:
    """Shard ``model`` in place over the default process group, on the device of its parameters. This is a collective.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    remove = STAND_INS.install() if next(model.parameters()).device.type == "cpu" else do_nothing
    with ExitStack() as unless_built:
        unless_built.callback(remove)
        engine = shard(model, config, remove)
        unless_built.pop_all()
    return engine


def shard(model: nn.Module, config: EngineConfig, remove_stand_ins: Callable[[], None]) -> MegatronEngine:
    """Shard ``model`` in place and return the engine, which calls ``remove_stand_ins`` when it is closed."""
    from megatron_fsdp import fully_shard_model

    device = next(model.parameters()).device
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wrapped = fully_shard_model(
        model,
        **describe_axes(config.mesh, device),
        fsdp_unit_modules=unit_classes(model, config.options),
        zero_dp_strategy=config.stage,
        device=device,
        calculate_per_token_loss=config.reduction is Reduction.SUM,
    )
    # Megatron-FSDP then divides and sums in two operations, since gloo has no PREMUL_SUM.
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    params = dict(wrapped.param_and_grad_buffer.optimizer_named_parameters)
    params = {name: params[name] for name in names if name in params}
    adapter = EngineAdapter(
        forward=wrapped.__call__,
        no_sync=partial(leave_unreduced, wrapped),
        params=params,
        full_tensors=identity,
        layout=find_pieces(params),
        drop_gradients=do_nothing,
        release=partial(release, wrapped, remove_stand_ins),
        build_optimizer=partial(build_optimizer, wrapped, bool(config.options.get(KEEP_FIRST_STEP))),
    )
    return MegatronEngine(model, capabilities_at(config.stage), config, adapter, wrapped)


def describe_axes(mesh: Mesh, device: torch.device) -> Mapping[str, Any]:
    """Return ``fully_shard_model``'s arguments that say which ranks shard, and which ranks have copies of shards."""
    shape = mesh.shape(dist.get_world_size())
    axes = (*((REPLICATE,) if REPLICATE in mesh.axes else ()), DATA_SHARD, TENSOR)
    arguments = {
        "device_mesh": get_device_mesh(device.type, tuple(shape[axis] for axis in axes), axes),
        "dp_shard_dim": DATA_SHARD,
        "tp_dim": TENSOR,
    }
    if REPLICATE in axes:
        arguments |= {"dp_outer_dim": REPLICATE, "hybrid_fsdp_group": dist.group.WORLD}
    return arguments


def release(wrapped: Any, remove_stand_ins: Callable[[], None]) -> None:
    """Remove the gradient hooks: they keep the model alive, because Python's garbage collector does not see them."""
    for hook in wrapped.grad_acc_hooks.values():
        hook.remove()
    remove_stand_ins()


def build_optimizer(
    wrapped: Any, keeps_first_step: bool, params: Mapping[str, Tensor], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Return the optimizer of ``spec`` as ``fully_shard_optimizer`` extends it.

    ``fully_shard_optimizer`` makes a step (NVIDIA/Megatron-LM#5974). This function undoes the step unless
    ``keeps_first_step``, because almost every law of optimizers with momentum or weight decay would fail because of the
    step, and show nothing else.
    """
    from megatron_fsdp import fully_shard_optimizer

    with keep_values(wrapped, [] if keeps_first_step else params.values()):
        optimizer: torch.optim.Optimizer = fully_shard_optimizer(optimizers.build(params, spec))
    if not keeps_first_step:
        optimizer.state.clear()
    return optimizer


@contextmanager
def keep_values(wrapped: Any, params: Iterable[Tensor]) -> Iterator[None]:
    """Restore, at the end of the block, the values that ``params`` had at its beginning."""
    kept = [(param, local_tensor(param).detach().clone()) for param in params]
    yield
    for param, value in kept:
        write_own_part(param, value.flatten())
    if kept:
        wrapped.install_optimized_model_weights()


@contextmanager
def leave_unreduced(wrapped: Any) -> Iterator[None]:
    """Leave gradients unreduced inside the block, as the package documents for ``no_shard``."""
    wrapped.set_model_auto_sync(False)
    try:
        with wrapped.no_sync():
            yield
    finally:
        wrapped.set_model_auto_sync(True)


class MegatronEngine(TorchEngine):
    """An engine whose weights, gradients and optimizer state are Megatron-FSDP's; see ``Engine``.

    A rank whose part of a weight is empty has no gradient and no optimizer state for this weight.
    """

    def __init__(
        self, model: nn.Module, capabilities: Capabilities, config: EngineConfig, adapter: EngineAdapter, wrapped: Any
    ) -> None:
        super().__init__(model, capabilities, config, adapter)
        self._wrapped = wrapped
        world_size, rank = dist.get_world_size(), dist.get_rank()
        first = config.mesh.rank_at_start(DATA_SHARD, rank, world_size)
        self._own_copy = range(first, first + config.mesh.shape(world_size)[DATA_SHARD])
        self._aliases = {
            alias: name
            for name, param in adapter.params.items()
            for alias, other in model.named_parameters(remove_duplicate=False)
            if other is param
        }

    def full_grads(self) -> dict[str, Tensor]:
        params = self._adapter.params
        views = all_gather_objects({name for name, param in params.items() if param.grad is not None}, Comm())
        return {name: self._full(name, param.grad) for name, param in params.items() if name in set.union(*views)}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = {name: self._full_state(name) for name in self._adapter.params}
        return {name: state for name, state in states.items() if state}

    def full_state_dict(self) -> dict[str, Tensor]:
        full = self._full_masters()
        return {
            name: full[self._aliases[name]] if name in self._aliases else snapshot(tensor)
            for name, tensor in self.module.state_dict().items()
        }

    def save(self, path: Path) -> None:
        write_state(path, self._state())

    def load(self, path: Path) -> None:
        if not has_optimizer_state(path):
            self._optimizer.state.clear()
        elif not self._optimizer.state:
            self._make_state()
        state = self._state()
        read_state(path / FOLDER_NAME, state)
        self._wrapped.load_state_dict(state["model"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _make_state(self) -> None:
        """Make the optimizer's state, into which a checkpoint is read, by the step that fully_shard_optimizer makes."""
        params = [param for param in self._adapter.params.values() if local_tensor(param).numel()]
        with keep_values(self._wrapped, params):
            for param in params:
                param.grad = torch.zeros_like(param)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as the package documents it."""
        return {
            "model": self._wrapped.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def read_grad(self, name: str) -> Tensor | None:
        grad = self._adapter.params[name].grad
        return self._full(name, grad) if is_true_on_any_rank(grad is not None, Comm()) else None

    def read_param(self, name: str) -> Tensor:
        return self._full(name, self._adapter.params[name])

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        return self._full_state(name).get(key)

    def write_grad(self, name: str, value: Tensor) -> None:
        self._write(name, self._adapter.params[name].grad, value)

    def write_param(self, name: str, value: Tensor) -> None:
        self._write(name, self._adapter.params[name], value)
        self._wrapped.install_optimized_model_weights()

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        state = self._optimizer.state.get(self._adapter.params[name], {})
        self._write(name, state.get(key), value)

    def read_grad_shard(self, name: str) -> Tensor:
        return copy_own_part(self._adapter.params[name].grad)

    def read_param_shard(self, name: str) -> Tensor:
        return copy_own_part(self._adapter.params[name])

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        return copy_own_part(self._optimizer.state.get(self._adapter.params[name], {}).get(key))

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        write_own_part(self._adapter.params[name].grad, value)

    def write_param_shard(self, name: str, value: Tensor) -> None:
        write_own_part(self._adapter.params[name], value)
        self._wrapped.install_optimized_model_weights()

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        write_own_part(self._optimizer.state.get(self._adapter.params[name], {}).get(key), value)

    def _full_masters(self) -> dict[str, Tensor]:
        return {name: self._full(name, param) for name, param in self._adapter.params.items()}

    def _full_state(self, name: str) -> dict[str, Tensor]:
        """Return the full optimizer state of one parameter. This is a collective."""
        param = self._adapter.params[name]
        state = {key: value for key, value in self._optimizer.state.get(param, {}).items() if isinstance(value, Tensor)}
        whole = {key: None if is_split(value) else value.clone() for key, value in state.items()}
        views = all_gather_objects(whole, Comm())
        known = {key: value for view in reversed(views) for key, value in view.items()}
        return {
            key: self._full(name, state.get(key)) if value is None else value for key, value in sorted(known.items())
        }

    def _full(self, name: str, tensor: Tensor | None) -> Tensor:
        """Return the full tensor of a parameter, gradient or state; this rank may have no part of the tensor.

        This is a collective.
        """
        param, pieces = self._adapter.params[name], self._adapter.layout.get(name)
        if pieces is None:
            return snapshot(local_tensor(param if tensor is None else tensor)).view(param.shape)
        return gather(copy_own_part(tensor), param.shape, pieces, self._own_copy)

    def _write(self, name: str, tensor: Tensor | None, value: Tensor) -> None:
        """Copy this rank's part of a full tensor into its part of ``tensor``."""
        pieces = self._adapter.layout.get(name)
        write_own_part(tensor, value.flatten() if pieces is None else own_part(value, pieces))


def is_split(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, and not a number that every rank has, such as a step count."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
