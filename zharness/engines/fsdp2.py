"""Adapt ``torch.distributed.fsdp.fully_shard`` to the Engine protocol: stage 3, and stage 2 without resharding."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from packaging.version import Version
from torch import nn

from zharness.comm import Comm
from zharness.engines import optimizers
from zharness.engines.fsdp2_deferred import initial_state_on_rank0, materialize_and_load
from zharness.engines.fsdp2_memory import measure_resources
from zharness.engines.fsdp2_options import (
    ALL_REDUCE,
    BOTH,
    DOCUMENTATION,
    GROUPS_REMAIN,
    KEYS_WITHOUT_MESH,
    OPTIONS,
    OPTIONS_AT_EVERY_STAGE,
    OPTIONS_AT_STAGE_3,
    OPTIONS_WITHOUT_MESH,
    REPLICA_REFUSES,
    UNSHARDABLE,
    VECTORS,
    ZERO_FILL_REASON,
    apply_options,
    build_mesh,
    build_offload_policy,
    build_precision_policy,
    find_unknown_options,
    require_method,
    reshard_after_forward,
)
from zharness.engines.fsdp_groups import BLOCK, LEAF, select_group_modules
from zharness.engines.gpu_options import FUSED, build_fused_optimizer, compile_in_place, drop_compiled_graphs
from zharness.engines.protocol import Capabilities, EngineConfig, Feature, Piece
from zharness.engines.tensor_parallel import build_device_mesh, find_owners, split_modules
from zharness.engines.torch_checkpoint import SHARDED_FORMAT
from zharness.engines.torch_engine import (
    PARAM_DTYPES,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    call_each,
    do_nothing,
    leaf_parameters,
    register_all_reduce_hooks,
    validate_config,
    without_refusal,
)
from zharness.engines.torch_gathers import gather_full_tensors
from zharness.errors import ConfigError
from zharness.mesh import DATA_SHARD, REPLICATE, TENSOR, Mesh
from zharness.reference.client.meta_init import infer_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

# Stage 3 is ``reshard_after_forward=True``: weights are resharded after forward and unsharded again in backward. Stage
# 2 is ``reshard_after_forward=False``: weights stay unsharded from forward to the end of backward. Gradients and
# optimizer state are sharded at both stages.
REFUSES = {
    **TORCH_REFUSES,
    Feature.RANK_BUFFERS: "torch.distributed.checkpoint saves a tensor that is not a DTensor once for all ranks",
    Feature.ENGINE_ACCUMULATION: (
        "fully_shard leaves it to the caller: set_requires_gradient_sync 'can be used to implement gradient "
        f"accumulation without communication' ({DOCUMENTATION})"
    ),
    **dict.fromkeys(
        (Feature.OUTSIDE_FORWARD, Feature.SUBMODULES, Feature.OWN_WEIGHT_GRADIENTS),
        "outside the forward of its group a parameter is a shard: 'a module forward pre-hook on module all-gathers the "
        f"parameters, and a module forward hook on module frees them' ({DOCUMENTATION})",
    ),
    Feature.UNEVEN_RANKS: (
        "the forward of each group is a collective, which every rank has to call: 'a module forward pre-hook on module "
        f"all-gathers the parameters' ({DOCUMENTATION})"
    ),
    Feature.SPARSE_GRADIENTS: "it copies gradients into one buffer by fsdp::chunk_cat, which takes dense tensors only",
    **dict.fromkeys(
        (Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS),
        "each rank shards the values of its own model, which the caller makes equal, as by set_model_state_dict with "
        "broadcast_from_rank0 (https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html)",
    ),
    Feature.EDITS: (
        "all ranks have to edit the parameter, a DTensor, together: 'represents the sharded parameters as DTensor s' "
        f"({DOCUMENTATION})"
    ),
}
STAGE_2_REFUSES = {
    Feature.RESOURCES: (
        "weights are unsharded only from forward to the end of backward (set_reshard_after_backward), so between steps "
        f"it uses less memory than the formula of stage 2 predicts ({DOCUMENTATION})"
    ),
}


def explain_unsupported_torch(torch_version: str) -> str:
    """Return the reason why FSDP2 cannot be built on ``torch_version``, without importing FSDP2, which is slow."""
    if Version(torch_version).release < (2, 6):
        return f"torch {torch_version} has no public fully_shard; use torch 2.8 or newer"
    return (
        f"on gloo fully_shard of torch {torch_version} sums where it documents a mean (pytorch/pytorch#162338), and "
        "has no set_force_sum_reduction_for_comms; use torch 2.8 or newer"
    )


def fully_sharded_modules(model: nn.Module, options: Mapping[str, Any]) -> list[nn.Module]:
    """Return the modules to which ``fully_shard`` is applied, the root last.

    ``fully_shard`` inserts a node of RegisterPostBackwardFunction into the autograd graph at the inputs of these
    modules. A root without direct parameters gets no node; a node there would change nothing.
    """
    return [*select_group_modules(model, str(options.get("grouping", LEAF)), options.get("in_root", ())), model]


# fully_shard is public in 2.6 and 2.7 too, but without set_force_sum_reduction_for_comms every mean on gloo is a sum.
IS_TORCH_SUPPORTED = Version(torch.__version__).release >= (2, 8)
CAPABILITIES = Capabilities(
    stages=frozenset({2, 3}),
    dtypes=frozenset(PARAM_DTYPES),
    refuses=without_refusal(Feature.AUTOCAST_SCALER, REFUSES),
    variants=OPTIONS_AT_EVERY_STAGE,
    absent="" if IS_TORCH_SUPPORTED else explain_unsupported_torch(torch.__version__),
    own_model={"grouping": BLOCK},  # the usual grouping of large models
    junctions=fully_sharded_modules,
    mesh_axes=frozenset({REPLICATE, TENSOR}),
    refuses_on={REPLICATE: REPLICA_REFUSES, TENSOR: GROUPS_REMAIN},
    options_not_on=dict.fromkeys((REPLICATE, TENSOR), OPTIONS_WITHOUT_MESH),
    unknown_options=find_unknown_options(),
)


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that FSDP2 refuses at ``stage``, and with the options of that stage."""
    if stage == 2:
        return replace(CAPABILITIES, refuses={**CAPABILITIES.refuses, **STAGE_2_REFUSES})
    return replace(CAPABILITIES, variants={**OPTIONS_AT_EVERY_STAGE, **OPTIONS_AT_STAGE_3})


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Shard ``model`` in place over the default process group, on the device of its parameters. This is a collective.

    A model on the meta device is initialized on rank 0. ``fully_shard`` cannot be undone: after ``close`` the model
    is still sharded. Raises ConfigError for an unsupported configuration.
    """
    from torch.distributed.fsdp import fully_shard

    validate_config(config, CAPABILITIES, OPTIONS)
    build_precision_policy(config)  # raises ConfigError for an unknown dtype before anything is sharded
    device = infer_device(model, Comm())
    refuse_options_on_mesh(config)
    devices = build_device_mesh(config.mesh, device) if config.mesh.sizes else None
    mesh = build_mesh(config, device) if devices is None else select_data_axes(devices, config.mesh)
    values = initial_state_on_rank0(model, device)
    ignored = ignored_parameters(model, config.options.get("ignored_params", False))
    shapes = {name: param.shape for name, param in leaf_parameters(model).items() if name not in ignored}
    if devices is not None:
        split_modules(model, config, devices)
    ignored_argument = ignored_params_argument(ignored.values(), fully_shard)
    for module in fully_sharded_modules(model, config.options):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward(config),
            mp_policy=build_precision_policy(config),
            offload_policy=build_offload_policy(config, device),
            **ignored_argument,
        )
    if values is not None:
        materialize_and_load(model, device, values)
    sharded = [cast("FSDPModule", module) for module in model.modules() if is_sharded(module)]
    apply_options(sharded, config)
    sync = GradientSync(model, sharded, config)
    params, replicas = leaf_parameters(model), mesh.size() // mesh.size(-1)
    # Not earlier, because materialize_and_load replaces the parameters that fully_shard ignores, together with their
    # hooks.
    register_all_reduce_hooks([params[name] for name in ignored], config.reduction)
    is_compiled = compile_in_place(model, config.options)
    reset = require_method("reset_iter_state", model) if config.options.get("reset_iter_state") else do_nothing
    adapter = EngineAdapter(
        forward=model.__call__,
        no_sync=sync.disable,
        # Collected now, while the shards are registered: between forward and backward, full parameters may be
        # registered.
        params=params,
        full_tensors=gather_full_tensors,
        compute_dtype=PARAM_DTYPES[config.dtype],
        layout={name: shard_pieces(tuple(shape), mesh.size(-1), replicas) for name, shape in shapes.items()}
        if devices is None
        else find_owners(params),
        drop_gradients=partial(call_each, reset, sync.drop_unreduced_gradients),
        release=partial(call_each, partial(reshard, sharded), drop_compiled_graphs if is_compiled else do_nothing),
        build_optimizer=build_fused_optimizer if config.options.get(FUSED) else optimizers.build,
        checkpoint_format=SHARDED_FORMAT,
        measure_resources=partial(measure_resources, sharded, params),
    )
    return TorchEngine(model, refuse_no_gradient(capabilities_at(config.stage), config.options), config, adapter)


def refuse_no_gradient(capabilities: Capabilities, options: Mapping[str, Any]) -> Capabilities:
    """Return ``capabilities`` under these options; one option fills unused gradients with zeros."""
    if not options.get("reduce_scatter_unused_params"):
        return capabilities
    return replace(capabilities, refuses={**capabilities.refuses, Feature.NO_GRADIENT: ZERO_FILL_REASON})


def refuse_options_on_mesh(config: EngineConfig) -> None:
    """Raise ConfigError for an option that cannot be set on a mesh with named axes."""
    for name in sorted(KEYS_WITHOUT_MESH):
        if config.mesh.sizes and config.options.get(name):
            raise ConfigError(f"the option {name} cannot be set on the mesh {config.mesh.label}")


def select_data_axes(devices: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """Return the part of the DeviceMesh over which ``fully_shard`` shards, and replicates if ``mesh`` says so."""
    return devices[DATA_SHARD] if REPLICATE not in mesh.axes else devices[REPLICATE, DATA_SHARD]


def ignored_parameters(model: nn.Module, kind: str | bool) -> dict[str, nn.Parameter]:
    """Return by name the parameters that ``fully_shard`` has to ignore. Raises ConfigError for an unknown kind."""
    if kind not in (False, True, UNSHARDABLE, VECTORS):
        raise ConfigError.unknown_name("ignored_params", kind, [UNSHARDABLE, VECTORS, "true", "false"])
    if kind == VECTORS:
        return {name: param for name, param in leaf_parameters(model).items() if param.dim() == 1}
    return unshardable_parameters(model) if kind else {}


def unshardable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that ``fully_shard`` cannot shard.

    These are scalars, empty and non-contiguous parameters, and any with another dtype than most parameters.
    """
    params = leaf_parameters(model)
    (usual_dtype, _), *_ = Counter(param.dtype for param in params.values()).most_common()
    return {
        name: param
        for name, param in params.items()
        if not (param.dim() and param.numel() and param.is_contiguous() and param.dtype == usual_dtype)
    }


def ignored_params_argument(ignored: Iterable[nn.Parameter], fully_shard: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword argument that makes ``fully_shard`` skip ``ignored``; empty if there are none to skip.

    Raises ConfigError if this release of torch has no such argument.
    """
    params = set(ignored)
    if params and "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ConfigError(f"fully_shard of torch {torch.__version__} has no ignored_params; use torch 2.7 or newer")
    return {"ignored_params": params} if params else {}


class GradientSync:
    """Switches gradient reduction of ``model`` off and on, and counts the no_sync blocks since ``zero_grad``.

    The option ``no_sync`` says what is switched off: reduce-scatter and all-reduce, or with replicas only the
    all-reduce. With the option ``reshard_after_backward`` weights stay unsharded while gradients are not reduced.
    """

    def __init__(self, model: nn.Module, sharded: list[FSDPModule], config: EngineConfig) -> None:
        self._kind = config.options.get("no_sync", BOTH)
        if self._kind not in (BOTH, ALL_REDUCE):
            raise ConfigError.unknown_name("no_sync", self._kind, [BOTH, ALL_REDUCE])
        self._keeps_weights = config.options.get("reshard_after_backward") is False
        self._model = model
        self._sharded = sharded
        self._unreduced_count = 0

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Leave gradients unreduced for all backwards inside the block."""
        self._unreduced_count += 1
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def drop_unreduced_gradients(self) -> None:
        """Drop the gradients that were not reduced. This is a collective if there was a no_sync block.

        These gradients are on the unsharded weights. ``zero_grad`` of the optimizer and the module does not see them,
        and the next reduced backward would add them. On torch 2.13 ``reset_iter_state`` keeps these gradients too,
        contrary to its documentation. It drops the gradients that were reduced within a row of ranks.
        """
        if self._unreduced_count and self._kind == ALL_REDUCE:
            require_method("reset_iter_state", self._model)()
        elif self._unreduced_count:
            for module in self._sharded:
                module.unshard()
            self._model.zero_grad(set_to_none=True)
            reshard(self._sharded)
        self._unreduced_count = 0

    def _set_gradient_sync(self, enabled: bool) -> None:
        for module in self._sharded:
            if self._keeps_weights:
                module.set_reshard_after_backward(enabled, recurse=False)
            if self._kind == ALL_REDUCE:
                module.set_requires_all_reduce(enabled, recurse=False)
            else:
                module.set_requires_gradient_sync(enabled, recurse=False)


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module``."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def reshard(sharded: list[FSDPModule]) -> None:
    """Reshard every module of ``sharded``."""
    for module in sharded:
        module.reshard()


def shard_pieces(shape: tuple[int, ...], shards: int, replicas: int = 1) -> tuple[Piece, ...]:
    """Return the flat elements that each rank owns of a tensor that ``torch.chunk`` splits along dimension 0.

    Each of ``replicas`` times ``shards`` ranks owns one shard. The last shards may be empty.
    """
    rows, row = shape[0], 1
    for size in shape[1:]:
        row *= size
    chunk = -(-rows // shards)
    edges = [(min(shard * chunk, rows) * row, min((shard + 1) * chunk, rows) * row) for shard in range(shards)]
    return tuple(
        Piece(replica * shards + shard, start, stop)
        for replica in range(replicas)
        for shard, (start, stop) in enumerate(edges)
        if start < stop
    )
