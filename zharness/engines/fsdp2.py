"""``torch.distributed.fsdp.fully_shard`` behind the Engine protocol: stage 3, and stage 2 without resharding."""

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

# Stage 3 is ``reshard_after_forward=True``: weights are freed after forward and gathered again in backward. Stage 2 is
# ``reshard_after_forward=False``: weights stay gathered from forward to the end of backward; gradients and optimizer
# state are sharded either way.
DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
REFUSES = {
    **TORCH_REFUSES,
    Feature.RANK_BUFFERS: "torch.distributed.checkpoint keeps one copy of a tensor that is no DTensor, for all ranks",
    Feature.ENGINE_ACCUMULATION: (
        "fully_shard leaves it to the caller: set_requires_gradient_sync 'can be used to implement gradient "
        f"accumulation without communication' ({DOCUMENTATION})"
    ),
    **dict.fromkeys(
        (Feature.OUTSIDE_FORWARD, Feature.SUBMODULES, Feature.OWN_WEIGHT_GRADIENTS),
        "outside the forward of its group a parameter is a shard: 'a module forward pre-hook on module all-gathers the "
        f"parameters, and a module forward hook on module frees them' ({DOCUMENTATION})",
    ),
    Feature.SPARSE_GRADIENTS: "it copies gradients into one buffer by fsdp::chunk_cat, which takes dense ones",
    Feature.EDITS: (
        "all ranks edit a parameter as the DTensor that it is: 'represents the sharded parameters as DTensor s' "
        f"({DOCUMENTATION})"
    ),
}
STAGE_2_REFUSES = {
    Feature.RESOURCES: (
        "weights are whole from forward to the end of backward alone (set_reshard_after_backward), so between steps it "
        f"holds less than the formula of stage 2 says ({DOCUMENTATION})"
    ),
}
LEAF, BLOCK, ROOT = "leaf", "block", "root"
VARIANTS: dict[str, dict[str, Any]] = {
    "one_group": {"grouping": ROOT},
    "kept_after_backward": {"reshard_after_backward": False},
}
# bf16 is ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``: weights are gathered, and gradients reduced, in bf16;
# the shards that the optimizer works on, and their gradients, stay fp32.
PARAM_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def explain_unsupported_torch(torch_version: str) -> str:
    """Why FSDP2 cannot be built on an older torch, decided without importing it, which takes a while."""
    if Version(torch_version).release < (2, 6):
        return f"torch {torch_version} has no public fully_shard; take torch 2.8 or newer"
    return (
        f"on gloo fully_shard of torch {torch_version} sums where it documents a mean (pytorch/pytorch#162338), and "
        "has no set_force_sum_reduction_for_comms; take torch 2.8 or newer"
    )


def fully_sharded_modules(model: nn.Module, options: Mapping[str, Any]) -> list[nn.Module]:
    """The modules that ``fully_shard`` is applied to, the root last: at their inputs it puts RegisterPostBackward's
    node into the graph. A root without parameters of its own has none, where one would change nothing either.
    """
    return [*select_group_modules(model, str(options.get("grouping", LEAF)), options.get("in_root", ())), model]


ZERO_FILL_REASON = (
    "reduce_scatter_unused_params: 'include zero gradients for parameters that did not receive a gradient in backward' "
    "(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)"
)
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# On gloo reduce_scatter with ReduceOp.AVG gives the sum on torch 2.8, and the mean on 2.13. Those between were not
# tried; to sum and divide afterwards is as right there.
GLOO_REDUCES_BY_MEAN = Version(torch.__version__).release >= (2, 13)
# 2.6 and 2.7 are public too, but without set_force_sum_reduction_for_comms every mean on gloo would be a sum.
IS_TORCH_SUPPORTED = Version(torch.__version__).release >= (2, 8)
CAPABILITIES = Capabilities(
    stages=frozenset({2, 3}),
    dtypes=frozenset(PARAM_DTYPES),
    refuses=REFUSES,
    variants=VARIANTS,
    absent="" if IS_TORCH_SUPPORTED else explain_unsupported_torch(torch.__version__),
    own_model={"grouping": BLOCK},  # as people shard
    junctions=fully_sharded_modules,
)
ADAPTER_OPTIONS = ("grouping", "in_root", "reduce_dtype", "reset_iter_state", "ignored_params", *AUTOCAST_OPTION)
OPTIONS = {
    "grouping": "'leaf': one group for each module that owns parameters, the default; 'block': one for each member of "
    "a ModuleList or Sequential; 'root': one group in all",
    "in_root": "modules by name that get no group of their own, as the root's forward reads their weights; default []",
    "reduce_dtype": "'fp32' or 'bf16': the dtype in which gradients are reduced; default that of the weights",
    "force_sum_reduction_for_comms": "reduce by sum and divide afterwards instead of averaging on the wire",
    "reduce_scatter_unused_params": "zeros for parameters without gradient on this rank",
    "reshard_after_backward": "free the gathered weights at the end of backward; default true",
    "reset_iter_state": "call reset_iter_state() with zero_grad, as after an exception; default false",
    "ignored_params": "leave to the caller, here to this adapter, the parameters that cannot be sharded; default false",
    **AUTOCAST_OPTION,
}


def capabilities_at(stage: int) -> Capabilities:
    """What FSDP2 claims at one stage."""
    return replace(CAPABILITIES, refuses={**REFUSES, **STAGE_2_REFUSES}) if stage == 2 else CAPABILITIES


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """``model`` fully sharded in place over the default group, on the device of its parameters. Collective.

    One on the meta device gets the values that its constructor would have drawn on rank 0. Raises ConfigError for a
    configuration that the adapter does not honour. ``fully_shard`` cannot be undone: after ``close`` the model is still
    sharded.
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
    kept_apart = ignored_params_argument(ignored.values(), fully_shard)
    for module in fully_sharded_modules(model, config.options):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=config.stage == 3,
            mp_policy=policy,
            **kept_apart,
        )
    if values is not None:
        materialize_and_load(model, device, values)
    sharded = [cast("FSDPModule", module) for module in model.modules() if is_sharded(module)]
    apply_options(sharded, config)
    sync = GradientSync(model, sharded)
    params = leaf_parameters(model)
    reset = require_method("reset_iter_state", model) if config.options.get("reset_iter_state") else do_nothing
    parts = EngineAdapter(
        forward=model.__call__,
        no_sync=sync.disable,
        # Taken here, while the shards are registered: between forward and backward the module may hold gathered ones.
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
    return TorchEngine(model, capabilities, config, parts)


def build_precision_policy(config: EngineConfig) -> MixedPrecisionPolicy:
    """In which dtypes weights are gathered and gradients reduced. Raises ConfigError for an unknown one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    asked = config.options.get("reduce_dtype")
    if asked is not None and asked not in REDUCE_DTYPES:
        raise ConfigError.unknown_name("reduce_dtype", asked, sorted(REDUCE_DTYPES))
    reduced = None if asked is None else REDUCE_DTYPES[asked]
    return MixedPrecisionPolicy(param_dtype=PARAM_DTYPES[config.dtype], reduce_dtype=reduced)


def call_each(*actions: Callable[[], None]) -> None:
    """Each of ``actions``."""
    for action in actions:
        action()


def unshardable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What ``fully_shard`` refuses or fails on, by name: scalars, empty tensors, strides and dtypes of their own."""
    found = leaf_parameters(model)
    (usual, _), *_ = Counter(param.dtype for param in found.values()).most_common()
    return {
        name: param
        for name, param in found.items()
        if not (param.dim() and param.numel() and param.is_contiguous() and param.dtype == usual)
    }


def ignored_params_argument(ignored: Iterable[nn.Parameter], fully_shard: Callable[..., Any]) -> dict[str, Any]:
    """The argument of ``fully_shard`` that leaves ``ignored`` alone. Raises ConfigError where this torch lacks it."""
    params = set(ignored)
    if params and "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ConfigError(f"fully_shard of torch {torch.__version__} has no ignored_params; take torch 2.7 or newer")
    return {"ignored_params": params} if params else {}


def require_method(name: str, module: nn.Module | FSDPModule) -> Callable[..., None]:
    """A method of an FSDPModule. Raises ConfigError where this torch lacks it."""
    found: Callable[..., None] | None = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"FSDPModule of torch {torch.__version__} has no {name}; take a newer torch")
    return found


def register_all_reduce_hooks(params: Iterable[nn.Parameter], reduction: Reduction) -> None:
    """Reduce every gradient that reaches ``params``, before it is added to others: what is ignored is the caller's."""

    def all_reduce_gradient(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total if reduction is Reduction.SUM else total / dist.get_world_size()

    for param in params:
        if param.requires_grad:
            param.register_hook(all_reduce_gradient)  # type: ignore[no-untyped-call]


class GradientSync:
    """Whether backwards of ``model`` reduce, and how many stretches since the last ``zero_grad`` did not."""

    def __init__(self, model: nn.Module, sharded: list[FSDPModule]) -> None:
        self._model = model
        self._sharded = sharded
        self._unreduced_count = 0

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Backwards inside keep their gradients on the gathered weights, unreduced."""
        self._unreduced_count += 1
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def drop_unreduced_gradients(self) -> None:
        """Drop the gradients that were never reduced. Collective when there may be any.

        They live on the gathered weights, where ``zero_grad`` of optimizer and module cannot see them; on torch 2.13
        ``reset_iter_state`` keeps them too, against its documentation, and the next reduced backward would add them.
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
    """The modules below ``model`` that get a group of their own, but those of ``in_root``: the rest is the root's.

    FSDP2 gathers a group around the forward of its module. So a module that owns parameters takes all below it along
    (its forward may read them without calling the owner, as MultiheadAttention reads out_proj.weight), a container
    without forward is no group, and tied parameters belong to the root, the one module that encloses all their owners.
    """
    if grouping not in (LEAF, BLOCK, ROOT):
        raise ConfigError.unknown_name("grouping", grouping, [LEAF, BLOCK, ROOT])
    modules = dict(model.named_modules())
    for name in in_root:
        if name not in modules:
            raise ConfigError.unknown_name("module in in_root", name, sorted(filter(None, modules)))
    if grouping == ROOT:
        return []
    left_out = {id(modules[name]) for name in in_root}
    owners = Counter(id(param) for module in model.modules() for param in direct_parameters(module))
    tied = frozenset(key for key, count in owners.items() if count > 1)
    if grouping == BLOCK:
        found = {id(module): module for module in topmost_blocks(model, tied)}
    else:
        found = {id(module): module for child in model.children() for module in topmost_owners(child, tied)}
    return [module for key, module in found.items() if key not in left_out]


def topmost_owners(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """From ``module`` downwards, the first modules that own parameters and hold none of ``tied``."""
    owns = direct_parameters(module)
    called = type(module).forward is not nn.Module.forward
    if owns and called and not any(id(param) in tied for param in module.parameters()):
        yield module
    else:
        for child in module.children():
            yield from topmost_owners(child, tied)


def topmost_blocks(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """From ``module`` downwards, the first members of a ModuleList or Sequential that hold parameters, none of
    ``tied``.
    """
    for child in module.children():
        params = [id(param) for param in child.parameters()]
        called = type(child).forward is not nn.Module.forward
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and called and params and not tied.intersection(params):
            yield child
        else:
            yield from topmost_blocks(child, tied)


def direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that ``module`` registers itself."""
    return list(module.parameters(recurse=False))


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module``."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def apply_options(sharded: list[FSDPModule], config: EngineConfig) -> None:
    """Reduction by sum and the named options, on every group. Raises ConfigError for one that this torch lacks."""
    options = {name: value for name, value in config.options.items() if name not in ADAPTER_OPTIONS}
    if config.reduction is Reduction.SUM:
        # Any factor but the world size would go through NCCL's PreMulSum, which gloo does not have.
        options |= {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True}
    elif not GLOO_REDUCES_BY_MEAN and dist.get_backend() == "gloo":
        # Left to itself it asks gloo for the mean and gets the sum: pytorch/pytorch#162338.
        options = {"force_sum_reduction_for_comms": True, **options}
    for name, value in options.items():
        for module in sharded:
            require_method(f"set_{name}", module)(value)


def reshard(sharded: list[FSDPModule]) -> None:
    """Free whatever is still gathered."""
    for module in sharded:
        module.reshard()


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; collective. Optimizer step counts are no shards and come back as they are."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_pieces(shape: tuple[int, ...], world_size: int) -> tuple[Piece, ...]:
    """Who owns which flat elements: ``torch.chunk`` of dimension 0, so late ranks may own fewer or none."""
    rows, row = shape[0], 1
    for size in shape[1:]:
        row *= size
    chunk = -(-rows // world_size)
    edges = [(min(rank * chunk, rows) * row, min((rank + 1) * chunk, rows) * row) for rank in range(world_size)]
    return tuple(Piece(rank, start, stop) for rank, (start, stop) in enumerate(edges) if start < stop)
