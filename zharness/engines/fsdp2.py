"""Adapt ``torch.distributed.fsdp.fully_shard`` to the Engine protocol: stage 3, and stage 2 without resharding."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.engines.fsdp2_deferred import initial_state_on_rank0, materialize_and_load
from zharness.engines.fsdp2_memory import measure_resources
from zharness.engines.protocol import Capabilities, EngineConfig, Feature, Piece, Reduction
from zharness.engines.torch_checkpoint import SHARDED_FORMAT
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    leaf_parameters,
    validate_config,
)
from zharness.errors import ConfigError
from zharness.reference.client.meta_init import infer_device

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# Stage 3 is ``reshard_after_forward=True``: weights are resharded after forward and unsharded again in backward. Stage
# 2 is ``reshard_after_forward=False``: weights stay unsharded from forward to the end of backward. Gradients and
# optimizer state are sharded at both stages.
DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
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
LEAF, BLOCK, ROOT = "leaf", "block", "root"
VARIANTS: dict[str, dict[str, Any]] = {
    "one_group": {"grouping": ROOT},
    "kept_after_backward": {"reshard_after_backward": False},
}
# bf16 is ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``: weights are all-gathered and gradients reduced in bf16;
# the shards that the optimizer updates, and their gradients, stay fp32.
PARAM_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


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


ZERO_FILL_REASON = (
    "reduce_scatter_unused_params: 'include zero gradients for parameters that did not receive a gradient in backward' "
    "(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)"
)
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# On gloo, reduce_scatter with ReduceOp.AVG returns the sum on torch 2.8 and the mean on 2.13. Releases in between were
# not tested; summing and dividing afterwards is correct on all of them.
GLOO_REDUCES_BY_MEAN = Version(torch.__version__).release >= (2, 13)
# fully_shard is public in 2.6 and 2.7 too, but without set_force_sum_reduction_for_comms every mean on gloo is a sum.
IS_TORCH_SUPPORTED = Version(torch.__version__).release >= (2, 8)
CAPABILITIES = Capabilities(
    stages=frozenset({2, 3}),
    dtypes=frozenset(PARAM_DTYPES),
    refuses=REFUSES,
    variants=VARIANTS,
    absent="" if IS_TORCH_SUPPORTED else explain_unsupported_torch(torch.__version__),
    own_model={"grouping": BLOCK},  # the usual grouping of large models
    junctions=fully_sharded_modules,
)
ADAPTER_OPTIONS = ("grouping", "in_root", "reduce_dtype", "reset_iter_state", "ignored_params", *AUTOCAST_OPTION)
OPTIONS = {
    "grouping": "'leaf' (default): one group per module that owns parameters; 'block': one per member of a ModuleList "
    "or Sequential; 'root': a single group",
    "in_root": "names of modules that belong to the root's group, as its forward reads their weights; default []",
    "reduce_dtype": "'fp32' or 'bf16': the dtype in which gradients are reduced; default that of the weights",
    "force_sum_reduction_for_comms": "reduce by sum and divide afterwards, instead of a collective that averages",
    "reduce_scatter_unused_params": "reduce zeros for parameters without gradient on this rank",
    "reshard_after_backward": "reshard weights at the end of backward; default true",
    "reset_iter_state": "call reset_iter_state() in zero_grad, as documented after an exception; default false",
    "ignored_params": "do not shard parameters that fully_shard refuses; this adapter reduces them; default false",
    **AUTOCAST_OPTION,
}


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that FSDP2 refuses at ``stage``."""
    return replace(CAPABILITIES, refuses={**REFUSES, **STAGE_2_REFUSES}) if stage == 2 else CAPABILITIES


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Shard ``model`` in place over the default process group, on the device of its parameters. This is a collective.

    A model on the meta device is initialized on rank 0. ``fully_shard`` cannot be undone: after ``close`` the model
    is still sharded. Raises ConfigError for an unsupported configuration.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    validate_config(config, CAPABILITIES, OPTIONS)
    policy = build_precision_policy(config)
    device = infer_device(model, Comm())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    values = initial_state_on_rank0(model, device)
    ignored = unshardable_parameters(model) if config.options.get("ignored_params") else {}
    register_all_reduce_hooks(ignored.values(), config.reduction)
    shapes = {name: param.shape for name, param in leaf_parameters(model).items() if name not in ignored}
    ignored_argument = ignored_params_argument(ignored.values(), fully_shard)
    for module in fully_sharded_modules(model, config.options):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=config.stage == 3,
            mp_policy=policy,
            **ignored_argument,
        )
    if values is not None:
        materialize_and_load(model, device, values)
    sharded = [cast("FSDPModule", module) for module in model.modules() if is_sharded(module)]
    apply_options(sharded, config)
    sync = GradientSync(model, sharded)
    params = leaf_parameters(model)
    reset = require_method("reset_iter_state", model) if config.options.get("reset_iter_state") else do_nothing
    adapter = EngineAdapter(
        forward=model.__call__,
        no_sync=sync.disable,
        # Collected now, while the shards are registered: between forward and backward the full parameters may be.
        params=params,
        full_tensor=gather_full_tensor,
        compute_dtype=PARAM_DTYPES[config.dtype],
        layout={name: shard_pieces(tuple(shape), dist.get_world_size()) for name, shape in shapes.items()},
        drop_gradients=partial(call_each, reset, sync.drop_unreduced_gradients),
        release=partial(reshard, sharded),
        checkpoint_format=SHARDED_FORMAT,
        measure_resources=partial(measure_resources, sharded, params),
    )
    capabilities = capabilities_at(config.stage)
    if config.options.get("reduce_scatter_unused_params"):
        capabilities = replace(capabilities, refuses={**capabilities.refuses, Feature.NO_GRADIENT: ZERO_FILL_REASON})
    return TorchEngine(model, capabilities, config, adapter)


def build_precision_policy(config: EngineConfig) -> MixedPrecisionPolicy:
    """Return the MixedPrecisionPolicy of ``config``. Raises ConfigError for an unknown reduce dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    name = config.options.get("reduce_dtype")
    if name is not None and name not in REDUCE_DTYPES:
        raise ConfigError.unknown_name("reduce_dtype", name, sorted(REDUCE_DTYPES))
    reduce_dtype = None if name is None else REDUCE_DTYPES[name]
    return MixedPrecisionPolicy(param_dtype=PARAM_DTYPES[config.dtype], reduce_dtype=reduce_dtype)


def call_each(*actions: Callable[[], None]) -> None:
    """Call each of ``actions``, in order."""
    for action in actions:
        action()


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


def require_method(name: str, module: nn.Module | FSDPModule) -> Callable[..., None]:
    """Return the method ``name`` of an FSDPModule. Raises ConfigError if this release of torch does not have it."""
    method: Callable[..., None] | None = getattr(module, name, None)
    if method is None:
        raise ConfigError(f"FSDPModule of torch {torch.__version__} has no {name}; use a newer torch")
    return method


def register_all_reduce_hooks(params: Iterable[nn.Parameter], reduction: Reduction) -> None:
    """All-reduce each gradient of ``params`` before autograd accumulates it, since FSDP2 skips ignored parameters."""

    def all_reduce_gradient(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total if reduction is Reduction.SUM else total / dist.get_world_size()

    for param in params:
        if param.requires_grad:
            param.register_hook(all_reduce_gradient)  # type: ignore[no-untyped-call]


class GradientSync:
    """Switches gradient reduction of ``model`` off and on, and counts the no_sync blocks since ``zero_grad``."""

    def __init__(self, model: nn.Module, sharded: list[FSDPModule]) -> None:
        self._model = model
        self._sharded = sharded
        self._unreduced_count = 0

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Leave gradients unreduced, on the unsharded weights, for all backwards inside the block."""
        self._unreduced_count += 1
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def drop_unreduced_gradients(self) -> None:
        """Drop the gradients that were not reduced. This is a collective if there was a no_sync block.

        These gradients are on the unsharded weights, where ``zero_grad`` of optimizer and module does not see them, and
        the next reduced backward would add them. On torch 2.13 ``reset_iter_state`` keeps them too, contrary to its
        documentation.
        """
        if self._unreduced_count:
            for module in self._sharded:
                module.unshard()
            self._model.zero_grad(set_to_none=True)
            reshard(self._sharded)
            self._unreduced_count = 0

    def _set_gradient_sync(self, enabled: bool) -> None:
        for module in self._sharded:
            module.set_requires_gradient_sync(enabled, recurse=False)


def select_group_modules(model: nn.Module, grouping: str, in_root: Sequence[str] = ()) -> list[nn.Module]:
    """Return the modules below ``model`` that get a parameter group; all other parameters are in the root's group.

    FSDP2 unshards a group around the forward of its module. Therefore a module that owns parameters includes its
    submodules (its forward may read their weights without calling them, as MultiheadAttention reads out_proj.weight),
    a container without forward is not a group, and tied parameters are in the root's group. ``in_root`` names modules
    that get no group. Raises ConfigError for an unknown grouping or module name.
    """
    if grouping not in (LEAF, BLOCK, ROOT):
        raise ConfigError.unknown_name("grouping", grouping, [LEAF, BLOCK, ROOT])
    modules = dict(model.named_modules())
    for name in in_root:
        if name not in modules:
            raise ConfigError.unknown_name("module in in_root", name, sorted(filter(None, modules)))
    if grouping == ROOT:
        return []
    excluded = {id(modules[name]) for name in in_root}
    owners = Counter(id(param) for module in model.modules() for param in direct_parameters(module))
    tied = frozenset(key for key, count in owners.items() if count > 1)
    if grouping == BLOCK:
        selected = {id(module): module for module in topmost_blocks(model, tied)}
    else:
        selected = {id(module): module for child in model.children() for module in topmost_owners(child, tied)}
    return [module for key, module in selected.items() if key not in excluded]


def topmost_owners(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """Yield the topmost modules from ``module`` down that own parameters and contain none of ``tied``.

    ``tied`` has the ids of tied parameters.
    """
    owned = direct_parameters(module)
    has_forward = type(module).forward is not nn.Module.forward
    if owned and has_forward and not any(id(param) in tied for param in module.parameters()):
        yield module
    else:
        for child in module.children():
            yield from topmost_owners(child, tied)


def topmost_blocks(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """Yield the topmost members of ModuleLists and Sequentials that have parameters, but none of ``tied``.

    ``tied`` has the ids of tied parameters.
    """
    for child in module.children():
        params = [id(param) for param in child.parameters()]
        is_block = isinstance(module, (nn.ModuleList, nn.Sequential)) and type(child).forward is not nn.Module.forward
        if is_block and params and not tied.intersection(params):
            yield child
        else:
            yield from topmost_blocks(child, tied)


def direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ``module`` registers itself, without those of submodules."""
    return list(module.parameters(recurse=False))


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module``."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def apply_options(sharded: list[FSDPModule], config: EngineConfig) -> None:
    """Pass the reduction and the options of ``config`` to FSDP2's setters on every module of ``sharded``.

    Raises ConfigError for an option that this release of torch does not have.
    """
    options = {name: value for name, value in config.options.items() if name not in ADAPTER_OPTIONS}
    if config.reduction is Reduction.SUM:
        # Without a forced sum, a factor other than the world size uses NCCL's PreMulSum, which gloo does not have.
        options |= {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True}
    elif not GLOO_REDUCES_BY_MEAN and dist.get_backend() == "gloo":
        # By default FSDP2 requests the mean from gloo and receives the sum: pytorch/pytorch#162338.
        options = {"force_sum_reduction_for_comms": True, **options}
    for name, value in options.items():
        for module in sharded:
            require_method(f"set_{name}", module)(value)


def reshard(sharded: list[FSDPModule]) -> None:
    """Reshard every module of ``sharded``."""
    for module in sharded:
        module.reshard()


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (collective), or any other tensor, such as a step count, unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_pieces(shape: tuple[int, ...], world_size: int) -> tuple[Piece, ...]:
    """Return the flat elements that each rank owns of a tensor that ``torch.chunk`` splits along dimension 0.

    The last ranks may own none.
    """
    rows, row = shape[0], 1
    for size in shape[1:]:
        row *= size
    chunk = -(-rows // world_size)
    edges = [(min(rank * chunk, rows) * row, min((rank + 1) * chunk, rows) * row) for rank in range(world_size)]
    return tuple(Piece(rank, start, stop) for rank, (start, stop) in enumerate(edges) if start < stop)
