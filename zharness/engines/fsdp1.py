"""Adapt ``torch.distributed.fsdp.FullyShardedDataParallel`` to the Engine protocol: stages 0, 2 and 3.

Stage 0 is the sharding strategy NO_SHARD, stage 2 is SHARD_GRAD_OP and stage 3 is FULL_SHARD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.fsdp1_checkpoint import FullStates, full_state_format
from zharness.engines.fsdp1_tensors import flat_layout, keep_original_names, measure_resources, sum_gradients, unwrap
from zharness.engines.fsdp2_deferred import initial_state_on_rank0
from zharness.engines.fsdp_groups import BLOCK, GROUPING_OPTIONS, LEAF, ROOT, select_group_modules
from zharness.engines.loss_scaling import build_sharded_scaler
from zharness.engines.protocol import Capabilities, EngineConfig, EngineOption, Feature, Reduction
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    PARAM_DTYPES,
    REDUCE_DTYPES,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    identity,
    leaf_parameters,
    register_all_reduce_hooks,
    snapshot,
    validate_config,
    without_refusal,
)
from zharness.errors import ConfigError
from zharness.reference.client.meta_init import infer_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/fsdp.html"
REFUSES = {
    **TORCH_REFUSES,
    Feature.RANK_BUFFERS: "a full state dict is saved by one rank for all: 'rank0_only' of FullStateDictConfig "
    f"({DOCUMENTATION})",
    Feature.ENGINE_ACCUMULATION: (
        "FSDP leaves it to the caller: no_sync() 'disables gradient synchronizations across FSDP instances' "
        f"({DOCUMENTATION})"
    ),
    **dict.fromkeys(
        (Feature.OUTSIDE_FORWARD, Feature.SUBMODULES, Feature.OWN_WEIGHT_GRADIENTS),
        "'FSDP does not support running the forward pass of a submodule that is contained in an FSDP instance. This is "
        f"because the submodule's parameters will be sharded' ({DOCUMENTATION})",
    ),
    Feature.RETAIN_GRAPH: (
        f"'FSDP does not work with double backwards due to the way it registers backward hooks' ({DOCUMENTATION})"
    ),
    Feature.UNEVEN_RANKS: (
        "the forward of each group is a collective, which every rank has to call: 'this strategy unshards (via "
        f"all-gather) before the forward' ({DOCUMENTATION})"
    ),
    **dict.fromkeys(
        (Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS),
        f"'sync_module_states=True requires GPU communication', and its default is False ({DOCUMENTATION})",
    ),
    Feature.EDITS: (
        "'The full parameters can be modified, but only the portion corresponding to the local param shard will "
        f"persist' ({DOCUMENTATION})"
    ),
    **dict.fromkeys(
        (Feature.TORCH_FUNC, Feature.TRANSFORMS),
        "its hooks take the storage of every tensor: 'Cannot access storage of TensorWrapper', or a segmentation fault",
    ),
    Feature.RESOURCES: "each parameter begins at a multiple of 16 bytes of its FlatParameter, which is padded for that",
    **dict.fromkeys(
        (Feature.READ_OUT, Feature.WRITE_IN, Feature.SHARD_ACCESS),
        "it has no function for one parameter: summon_full_params and optim_state_dict gather all of a module "
        f"({DOCUMENTATION})",
    ),
    Feature.MUON: "a rank's part of a FlatParameter has one dimension, and torch.optim.Muon takes matrices alone",
    Feature.SPARSE_GRADIENTS: "the gradients of a FlatParameter are views of one dense tensor",
    Feature.NO_GRADIENT: "the gradient of a FlatParameter has zeros for parameters that no rank used",
}
GROUPS_REMAIN = "the process groups of its device mesh, and their threads, live until destroy_process_group"
NEEDS_ACCELERATOR = "" if torch.cuda.is_available() else "without a GPU FSDP raises: "
REPLICA_REFUSES = {
    Feature.STEADINESS: GROUPS_REMAIN,
    Feature.RESHARD: "stage 0 has no shards to replicate, and therefore no replicas",
    Feature.SUM: "'Communication hook is not supported for hybrid strategies' (the error of register_comm_hook)",
}
VARIANTS = {
    "one_group": EngineOption({"grouping": ROOT}),
    "next_prefetched_in_forward": EngineOption({"forward_prefetch": True}),
    "prefetched_after_gradients": EngineOption({"backward_prefetch": "post"}),
    "not_prefetched": EngineOption({"backward_prefetch": "none"}),
    "gathers_not_limited": EngineOption({"limit_all_gathers": False}),
    "inputs_cast": EngineOption({"cast_forward_inputs": True}, changes_numbers="under bf16 more inputs are rounded"),
    "reduced_in_fp32": EngineOption(
        {"reduce_dtype": "fp32"},
        reduce_dtypes={"bf16": "fp32", "fp16": "fp32"},
        changes_numbers="under bf16 and fp16 gradients are summed in fp32",
    ),
    "reduced_in_bf16": EngineOption(
        {"reduce_dtype": "bf16"},
        refuses={Feature.AUTOCAST: "its laws state the bounds of a reduction in the dtype of the model"},
        reduce_dtypes={"fp32": "bf16", "fp16": "bf16"},
        changes_numbers="gradients are summed in bf16",
    ),
    # MixedPrecision does not cast ignored parameters, so F.linear gets two dtypes.
    "vectors_ignored": EngineOption(
        {"ignored_params": True},
        refuses={
            Feature.DEFERRED: f"ignored parameters 'will not be managed by this FSDP instance' ({DOCUMENTATION})",
        },
        dtypes=frozenset({"fp32"}),
    ),
    "optimizer_state_offload": EngineOption({"optimizer_state_offload": True}),
    "cpu_offload": EngineOption(
        {"cpu_offload": True},
        absent=NEEDS_ACCELERATOR and NEEDS_ACCELERATOR + "'Cannot access accelerator device when none is available'",
    ),
    "synchronized": EngineOption(
        {"sync_module_states": True},
        absent=NEEDS_ACCELERATOR and NEEDS_ACCELERATOR + "'sync_module_states=True, which requires them to be on GPU'",
    ),
}
# Stage 0 has no shards to replicate.
VARIANTS_OF_SHARDS = {
    "one_replica": EngineOption({"replicas": 1}, refuses=REPLICA_REFUSES),
    "two_replicas": EngineOption(
        {"replicas": 2},
        refuses=REPLICA_REFUSES,
        # One rank per replica (2 replicas on 2 ranks) is not tested, because FSDP then does not reduce gradients (repro
        # hybrid-of-single-ranks). Expected failures of this setting are not recorded for single laws.
        world_size_factor=4,
        changes_numbers="gradients and their norm are summed in another order",
    ),
}
# bf16 is ``MixedPrecision(param_dtype=torch.bfloat16)``: weights are all-gathered and gradients reduced in bf16; the
# shards that the optimizer updates, and their gradients, stay fp32. fp16 is the same with torch.float16, and uses a
# ShardedGradScaler.
CAPABILITIES = Capabilities(
    stages=frozenset({0, 2, 3}),
    dtypes=frozenset(PARAM_DTYPES),
    refuses=without_refusal(Feature.AUTOCAST_SCALER, REFUSES),
    variants=VARIANTS,
    own_model={"grouping": BLOCK},
)
# Each backward averages the gradients accumulated so far, so on three ranks the sum of several backwards is rounded.
SCALED_SUM_REASON = "NO_SHARD can only average; the adapter multiplies gradients by the world size before the mean"
# Options that are passed to FullyShardedDataParallel unchanged.
PASSED_ON = {
    "forward_prefetch": "all-gather the next group before the forward of the current one; default false",
    "limit_all_gathers": "limit the number of groups that are gathered at a time; default true",
    "sync_module_states": "broadcast rank 0's weights and buffers when the engine is built; default false",
}
POLICY = {
    "cast_forward_inputs": "cast the inputs of every group to the dtype of the weights; default false",
    "cast_root_forward_inputs": "cast the inputs of the model to the dtype of the weights; default true",
}
OPTIONS = {
    **GROUPING_OPTIONS,
    **PASSED_ON,
    **POLICY,
    "reduce_dtype": "'fp32', 'bf16' or 'fp16': the dtype in which gradients are reduced; default that of the weights",
    "backward_prefetch": "'pre' (default), 'post' or 'none': when backward all-gathers the next group",
    "optimizer_state_offload": "offload_to_cpu of FullOptimStateDictConfig, torch's default; default false",
    "replicas": "shard over world size / replicas ranks and replicate over this many, as HYBRID_SHARD does",
    "cpu_offload": "keep shards and gradients on the CPU between uses (CPUOffload); default false",
    "ignored_params": "do not shard parameters of one dimension (ignored_states); this adapter reduces them; "
    "default false",
    **AUTOCAST_OPTION,
}


def capabilities_at(stage: int) -> Capabilities:
    """Return the capabilities of FSDP1 at ``stage``.

    Stage 0 lacks the options that concern shards, and computes a sum over ranks as a mean of scaled gradients.
    """
    if stage == 0:
        return replace(CAPABILITIES, scaled_sum=SCALED_SUM_REASON)
    return replace(CAPABILITIES, variants={**VARIANTS, **VARIANTS_OF_SHARDS})


def factory(model: nn.Module, config: EngineConfig) -> FSDP1Engine:
    """Wrap ``model`` in FSDP over the default process group, on the device of its parameters. This is a collective.

    Rank 0 draws the initial values of a model on the meta device. Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    aliases = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(param): name for name, param in model.named_parameters()}
    tied = {name: first_names[id(aliases[name])] if name in aliases else name for name in model.state_dict()}
    wrapped = wrap(model, config)
    params = leaf_parameters(model)
    states = FullStates(wrapped, offload=bool(config.options.get("optimizer_state_offload", False)))
    adapter = EngineAdapter(
        forward=wrapped.__call__,
        no_sync=wrapped.no_sync,
        params=params,
        full_tensors=identity,
        layout=flat_layout(wrapped, params),
        drop_gradients=do_nothing,
        release=partial(unwrap, model),
        compute_dtype=PARAM_DTYPES[config.dtype],
        build_scaler=build_sharded_scaler,
        checkpoint_format=full_state_format(states),
        measure_resources=partial(measure_resources, wrapped, params),
    )
    return FSDP1Engine(model, capabilities_at(config.stage), config, adapter, states, tied)


def wrap(model: nn.Module, config: EngineConfig) -> FullyShardedDataParallel:
    """Wrap ``model``, and each group of its modules, in FSDP in place. This is a collective.

    Raises ConfigError for an unknown option, parameter or dtype, and for replicas that do not divide the world size.
    """
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    options = config.options
    device = infer_device(model, Comm())
    groups = {
        id(module)
        for module in select_group_modules(model, str(options.get("grouping", LEAF)), options.get("in_root", ()))
    }
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=build_mesh(options, device),
        sharding_strategy=select_strategy(config.stage, replicated="replicas" in options),
        cpu_offload=CPUOffload(offload_params=True) if options.get("cpu_offload") else None,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in groups),
        backward_prefetch=select_prefetch(options),
        mixed_precision=build_mixed_precision(config),
        device_id=device,
        use_orig_params=True,
        ignored_states=ignore_parameters(model, config) or None,
        **{**initialization(model, device), **{name: options[name] for name in PASSED_ON if name in options}},
    )
    keep_original_names(model)
    wrapped.check_is_root()  # now: otherwise the first use of ``model`` would make each inner group a root
    if config.reduction is Reduction.SUM:
        sum_gradients(wrapped, "replicas" in options)
    return wrapped


def build_mesh(options: Mapping[str, Any], device: torch.device) -> DeviceMesh | None:
    """Return a mesh in which each of ``replicas`` rows shards the model, or None to use the default process group.

    Raises ConfigError if the number of replicas does not divide the world size.
    """
    if "replicas" not in options:
        return None
    replicas, world_size = int(options["replicas"]), dist.get_world_size()
    if replicas < 1 or world_size % replicas:
        raise ConfigError(f"replicas is {replicas}, which does not divide the world size {world_size}")
    return get_device_mesh(device.type, (replicas, world_size // replicas), ("replicate", "shard"))


def select_strategy(stage: int, *, replicated: bool) -> ShardingStrategy:
    """Return the sharding strategy of ``stage``.

    Raises ConfigError for replicas at stage 0, where nothing is sharded.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if not replicated:
        return {
            0: ShardingStrategy.NO_SHARD,
            2: ShardingStrategy.SHARD_GRAD_OP,
            3: ShardingStrategy.FULL_SHARD,
        }[stage]
    if stage == 0:
        raise ConfigError("got replicas at stage 0, where every rank has a full replica; use stage 2 or 3")
    return ShardingStrategy.HYBRID_SHARD if stage == 3 else ShardingStrategy._HYBRID_SHARD_ZERO2


def select_prefetch(options: Mapping[str, Any]) -> BackwardPrefetch | None:
    """Return the argument ``backward_prefetch`` of FSDP. Raises ConfigError if the option has an unknown value."""
    from torch.distributed.fsdp import BackwardPrefetch

    values = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    name = options.get("backward_prefetch", "pre")
    if name not in values:
        raise ConfigError.unknown_name("backward_prefetch", name, sorted(values))
    return values[name]


def build_mixed_precision(config: EngineConfig) -> MixedPrecision | None:
    """Return the MixedPrecision of ``config``, or None for plain fp32. Raises ConfigError for an unknown dtype."""
    from torch.distributed.fsdp import MixedPrecision

    name = config.options.get("reduce_dtype")
    if name is not None and name not in REDUCE_DTYPES:
        raise ConfigError.unknown_name("reduce_dtype", name, sorted(REDUCE_DTYPES))
    settings = {key: config.options[key] for key in POLICY if key in config.options}
    if name is not None:
        settings["reduce_dtype"] = REDUCE_DTYPES[name]
    if (param_dtype := PARAM_DTYPES[config.dtype]) is not None:
        settings["param_dtype"] = param_dtype
    return MixedPrecision(**settings) if settings else None


def ignore_parameters(model: nn.Module, config: EngineConfig) -> list[nn.Parameter]:
    """Return the parameters that FSDP has to ignore, and register hooks that reduce their gradients."""
    if not config.options.get("ignored_params"):
        return []
    ignored = [param for param in model.parameters() if param.dim() == 1]
    register_all_reduce_hooks(ignored, config.reduction)
    return ignored


def initialization(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return the FSDP arguments that give all ranks rank 0's initial values of a model on the meta device.

    For any other model, return an empty dictionary.
    """
    values = initial_state_on_rank0(model, device)
    if values is None:
        return {}
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}

    @torch.no_grad()
    def allocate(module: nn.Module) -> None:
        """Allocate the tensors of ``module``, but not of its submodules, and broadcast their values from rank 0."""
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_meta:
                empty = torch.empty_like(tensor, device=device)
                is_param = isinstance(tensor, nn.Parameter)
                torch.utils.swap_tensors(tensor, nn.Parameter(empty, tensor.requires_grad) if is_param else empty)  # type: ignore[no-untyped-call]
            if values:
                tensor.copy_(values[prefixes[id(module)] + name])
            dist.broadcast(tensor, src=0)  # not sync_module_states, which refuses tensors on the CPU

    return {"param_init_fn": allocate}


class FSDP1Engine(TorchEngine):
    """An engine whose full tensors, norm and state dicts come from the methods of FullyShardedDataParallel.

    ``tied`` maps the names of the plain model's ``state_dict()``, in their order, to the first name of the same tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        capabilities: Capabilities,
        config: EngineConfig,
        adapter: EngineAdapter,
        states: FullStates,
        tied: Mapping[str, str],
    ) -> None:
        super().__init__(module, capabilities, config, adapter)
        self._wrapped = states.wrapped
        self._states = states
        self._tied = tied

    def clip_gradients(self, limit: float) -> float:
        return float(self._wrapped.clip_grad_norm_(limit))

    def full_grads(self) -> dict[str, Tensor]:
        with self._wrapped.summon_full_params(self._wrapped, writeback=False, with_grads=True):
            # Frozen parameters that share a FlatParameter with others have zeros, which no optimizer step uses.
            return {
                name: self._scaler.unscale(snapshot(param.grad))
                for name, param in self._adapter.params.items()
                if param.grad is not None and param.requires_grad
            }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = self._states.optimizer(self._optimizer)["state"]
        return {
            name: {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}
            for name, state in states.items()
            if state
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain model's ``state_dict()`` on CPU, with one tensor for each tied parameter.

        This is a collective.
        """
        state = {name: snapshot(value) for name, value in self._states.model().items()}
        return {name: state[first] for name, first in self._tied.items()}

    def _full_masters(self) -> dict[str, Tensor]:
        with self._wrapped.summon_full_params(self._wrapped, writeback=False):
            return {name: snapshot(param) for name, param in self._adapter.params.items()}
