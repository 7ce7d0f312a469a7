"""Define the options of FSDP2 that zharness can set, and pass each to ``fully_shard`` or to a setter of FSDPModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from zharness.device import is_gpu_requested
from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.fsdp_groups import GROUPING_OPTIONS, ROOT
from zharness.engines.gpu_options import GPU_OPTIONS, NO_GPU, shared_options
from zharness.engines.protocol import EngineConfig, EngineOption, Feature, Reduction
from zharness.engines.torch_access import BY_STATE_DICT, TENSOR_ACCESS
from zharness.engines.torch_engine import AUTOCAST_OPTION, PARAM_DTYPES, REDUCE_DTYPES
from zharness.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
# On gloo, reduce_scatter with ReduceOp.AVG returns the sum on torch 2.8 and the mean on 2.13. Releases in between were
# not tested; summing and dividing afterwards is correct on all of them.
GLOO_REDUCES_BY_MEAN = Version(torch.__version__).release >= (2, 13)
NOT_BEFORE_2_13 = (
    ""
    if Version(torch.__version__).release >= (2, 13)
    else f"tried with torch 2.13 only, and this is torch {torch.__version__}"
)
ZERO_FILL_REASON = (
    "reduce_scatter_unused_params: 'include zero gradients for parameters that did not receive a gradient in backward' "
    f"({DOCUMENTATION})"
)
GROUPS_REMAIN = {
    Feature.STEADINESS: "the process groups that it adds, and their threads, live until destroy_process_group"
}
REPLICA_REFUSES = {
    **GROUPS_REMAIN,
    Feature.RESOURCES: f"shards are as large as with fewer ranks: 'replicated across the 0th dim' ({DOCUMENTATION})",
}
KEYS_WITHOUT_MESH = frozenset({"replicas", "ignored_params"})  # they count ranks, and ignore the axes of a mesh
UNSHARDED_REASON = f"ignored_params: 'They will not be sharded' ({DOCUMENTATION})"
REPLICAS_CHANGE_NUMBERS = "gradients and their norm are summed in another order"
# Values of options for which FSDPModule has no setter of the same name.
AUTO = "auto"
UNSHARDABLE, VECTORS = "unshardable", "vectors"
BOTH, ALL_REDUCE = "both", "all_reduce"
PIN_MEMORY = "pin_memory"
FUSED_LAWS = frozenset({"state.resume-adamw"})
FUSED_REASON = (
    "DTensor has a sharding strategy for the fused Adam and AdamW alone (aten._fused_sgd_ 'does not have a sharding "
    "strategy registered'), and other laws replay Adam's unfused operations"
)

OPTIONS_AT_EVERY_STAGE: dict[str, EngineOption] = {
    "one_group": EngineOption({"grouping": ROOT}),
    "kept_after_backward": EngineOption({"reshard_after_backward": False}),
    "two_replicas": EngineOption(
        {"replicas": 2}, refuses=REPLICA_REFUSES, world_size_factor=2, changes_numbers=REPLICAS_CHANGE_NUMBERS
    ),
    "one_replica": EngineOption({"replicas": 1}, refuses=GROUPS_REMAIN),
    "all_reduce_last": EngineOption(
        {"replicas": 2, "no_sync": ALL_REDUCE},
        refuses=REPLICA_REFUSES,
        world_size_factor=2,
        changes_numbers=REPLICAS_CHANGE_NUMBERS,
    ),
    "cpu_offload": EngineOption({"cpu_offload": True}),
    "offload_unpinned": EngineOption(
        {"cpu_offload": True, PIN_MEMORY: False}, absent="" if is_gpu_requested() else NO_GPU
    ),
    "inputs_not_cast": EngineOption({"cast_forward_inputs": False}),
    # Under bf16 the loss would be in fp32, which the plain model does not have.
    "outputs_in_fp32": EngineOption(
        {"output_dtype": "fp32"},
        refuses={
            Feature.AUTOCAST: "output_dtype 'specifies the dtype for casting floating-point forward outputs', also of "
            f"those that autocast made ({DOCUMENTATION})"
        },
        dtypes=frozenset({"fp32"}),
    ),
    "reduced_in_fp32": EngineOption(
        {"reduce_dtype": "fp32"},
        reduce_dtypes={
            "bf16": "fp32",
            "fp16": "fp32",
            "fp32": "fp32",
        },  # the last is about float64 weights in a model of fp32
        changes_numbers="under bf16 and fp16 gradients are summed in fp32",
    ),
    "reduced_in_bf16": EngineOption(
        {"reduce_dtype": "bf16"},
        refuses={Feature.AUTOCAST: "its laws state the bounds of a reduction in the dtype of the model"},
        reduce_dtypes={"fp32": "bf16", "fp16": "bf16"},
        changes_numbers="gradients are summed in bf16",
    ),
    "vectors_ignored": EngineOption(
        {"ignored_params": VECTORS},
        excludes={
            "fused_optimizer": "the kernel takes all weights at once, those that are ignored too: 'got mixed "
            "torch.Tensor and DTensor'"
        },
        refuses={
            **dict.fromkeys((Feature.RESOURCES, Feature.SHARD_ACCESS), UNSHARDED_REASON),
            **dict.fromkeys(
                (Feature.CLIP, Feature.AUTOCAST_SCALER),
                "clip_grad_norm_ and GradScaler raise 'got mixed torch.Tensor and DTensor'",
            ),
        },
        dtypes=frozenset(
            {"fp32"}
        ),  # MixedPrecisionPolicy does not cast ignored parameters, so F.linear gets two dtypes
    ),
    "two_prefetched_in_forward": EngineOption({"forward_prefetch": 2}),
    "two_prefetched_in_backward": EngineOption({"backward_prefetch": 2}),
    "embeddings_stay_sharded": EngineOption({"unshard_in_backward": False}),
    "sums": EngineOption({"force_sum_reduction_for_comms": True}),
    "zeros_for_unused": EngineOption(
        {"reduce_scatter_unused_params": True},
        refuses={Feature.NO_GRADIENT: ZERO_FILL_REASON},
        absent=NOT_BEFORE_2_13,
        changes_numbers="an unused parameter has zeros instead of no gradient, which weight decay and momentum see",
    ),
    "two_reduce_buffers": EngineOption({"reduce_scatter_max_input_buffers": 2}, absent=NOT_BEFORE_2_13),
    "own_reduce_group": EngineOption(
        {"separate_reduce_scatter_group": True}, refuses=GROUPS_REMAIN, absent=NOT_BEFORE_2_13
    ),
    "iteration_reset": EngineOption({"reset_iter_state": True}, absent=NOT_BEFORE_2_13),
    "access_by_state_dict": EngineOption({TENSOR_ACCESS: BY_STATE_DICT}),
    **shared_options(FUSED_LAWS, FUSED_REASON),
}
OPTIONS_WITHOUT_MESH = frozenset(
    name for name, option in OPTIONS_AT_EVERY_STAGE.items() if not KEYS_WITHOUT_MESH.isdisjoint(option.options)
)
OPTIONS_AT_STAGE_3 = {
    "root_kept_after_forward": EngineOption({"reshard_after_forward": AUTO}),
    "resharded_to_two": EngineOption(
        {"reshard_after_forward": 2},
        refuses=GROUPS_REMAIN,
        excludes=dict.fromkeys(("two_replicas", "all_reduce_last"), "each replica of two ranks has one shard"),
        world_size_factor=2,
        shard_factor=2,
    ),
}
OPTIONS = {
    **GROUPING_OPTIONS,
    "replicas": "an HSDP mesh: replicate over this many rows of ranks, each of which shards the model",
    "no_sync": "'both' (default): neither reduce-scatter nor all-reduce; 'all_reduce': reduce-scatter, not all-reduce",
    "reshard_after_forward": "the argument of fully_shard: true, false, a number of ranks, or 'auto' for its default",
    "cpu_offload": "CPUOffloadPolicy, without pinned memory if there is no accelerator; default false",
    PIN_MEMORY: "CPUOffloadPolicy: pin the memory of offloaded shards, from which a GPU copies beside its computation; "
    "default true on a GPU",
    "cast_forward_inputs": "MixedPrecisionPolicy: cast a module's inputs to the dtype of its weights; default true",
    "output_dtype": "'fp32', 'bf16' or 'fp16': MixedPrecisionPolicy: cast the outputs of modules; default no cast",
    "reduce_dtype": "'fp32', 'bf16' or 'fp16': the dtype in which gradients are reduced; default that of the weights",
    "ignored_params": "do not shard 'unshardable' parameters (or true): those that fully_shard refuses; or 'vectors', "
    "those of one dimension; this adapter reduces them; default false",
    "forward_prefetch": "all-gather this many further groups in the forward of each; default 0",
    "backward_prefetch": "all-gather this many further groups in the backward of each; default one, chosen by torch",
    "unshard_in_backward": "false: do not all-gather embeddings in backward; default true",
    "reset_iter_state": "call reset_iter_state() in zero_grad, as documented after an exception; default false",
    "force_sum_reduction_for_comms": "reduce by sum and divide afterwards, instead of a collective that averages",
    "reduce_scatter_unused_params": "reduce zeros for parameters without gradient on this rank",
    "reduce_scatter_max_input_buffers": "the number of buffers of gradients that may be in flight; default 1",
    "separate_reduce_scatter_group": "reduce-scatter in a process group of its own; default false",
    "reshard_after_backward": "false: keep weights unsharded after the backwards in no_sync(); default true",
    TENSOR_ACCESS: "'tensor' (default): read and write single tensors as DTensors; 'state_dict': weights and optimizer "
    "state by torch.distributed.checkpoint.state_dict",
    **AUTOCAST_OPTION,
    **GPU_OPTIONS,
}
# Options that are passed to a setter of the same name on every FSDPModule.
SETTERS = (
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group",
)


def build_mesh(config: EngineConfig, device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks: one row, or one row for each replica.

    Raises ConfigError if the number of replicas does not divide the world size.
    """
    world_size = dist.get_world_size()
    if "replicas" not in config.options:
        return get_device_mesh(device.type, (world_size,))
    replicas = int(config.options["replicas"])
    if replicas < 1 or world_size % replicas:
        raise ConfigError(f"replicas is {replicas}, which does not divide the world size {world_size}")
    return get_device_mesh(device.type, (replicas, world_size // replicas), ("replicate", "shard"))


def build_precision_policy(config: EngineConfig) -> MixedPrecisionPolicy:
    """Return the MixedPrecisionPolicy of ``config``. Raises ConfigError for an unknown dtype.

    In bf16 and fp16, weights are all-gathered and gradients are reduced in this dtype. The shards that the optimizer
    updates, and their gradients, stay fp32. With fp16 the caller has a GradScaler.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=PARAM_DTYPES[config.dtype],
        reduce_dtype=named_dtype(config, "reduce_dtype"),
        output_dtype=named_dtype(config, "output_dtype"),
        cast_forward_inputs=bool(config.options.get("cast_forward_inputs", True)),
    )


def named_dtype(config: EngineConfig, option: str) -> torch.dtype | None:
    """Return the dtype that an option names, or None if it is not set. Raises ConfigError for an unknown name."""
    name = config.options.get(option)
    if name is not None and name not in REDUCE_DTYPES:
        raise ConfigError.unknown_name(option, name, sorted(REDUCE_DTYPES))
    return None if name is None else REDUCE_DTYPES[name]


def build_offload_policy(config: EngineConfig, device: torch.device) -> OffloadPolicy:
    """Return the offload policy of ``config``. Memory is pinned only for an accelerator, as the CPU cannot pin it."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not config.options.get("cpu_offload"):
        return OffloadPolicy()
    pins = bool(config.options.get(PIN_MEMORY, True))
    return CPUOffloadPolicy(pin_memory=pins and device.type != "cpu")


def reshard_after_forward(config: EngineConfig) -> bool | int | None:
    """Return the argument ``reshard_after_forward`` of ``fully_shard``: by default, whether the stage is 3."""
    value = config.options.get("reshard_after_forward", config.stage == 3)
    return None if value == AUTO else cast("bool | int", value)


@cache
def find_unknown_options() -> Mapping[str, str]:
    """Return the options whose method this release of FSDPModule lacks, each with the reason.

    The methods are read from torch's source, because importing FSDP2 takes a second.
    """
    source = Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard" / "_fully_shard.py"
    text = source.read_text() if source.is_file() else ""
    methods = {"reset_iter_state": "reset_iter_state", **{name: f"set_{name}" for name in SETTERS}}
    return {
        option: f"FSDPModule of torch {torch.__version__} has no {method}; use a newer torch"
        for option, method in methods.items()
        if text and f"def {method}(" not in text
    }


def require_method(name: str, module: nn.Module | FSDPModule) -> Callable[..., None]:
    """Return the method ``name`` of an FSDPModule. Raises ConfigError if this release of torch does not have it."""
    method: Callable[..., None] | None = getattr(module, name, None)
    if method is None:
        raise ConfigError(f"FSDPModule of torch {torch.__version__} has no {name}; use a newer torch")
    return method


def apply_options(sharded: Sequence[FSDPModule], config: EngineConfig) -> None:
    """Pass the reduction and the options of ``config`` to FSDP2's setters on every module of ``sharded``.

    ``sharded`` begins with the root, and is otherwise in the order of the model. Raises ConfigError for an option that
    this release of torch does not have.
    """
    values: dict[str, Any] = {name: config.options[name] for name in SETTERS if name in config.options}
    if config.reduction is Reduction.SUM:
        # Without a forced sum, a factor other than the world size uses NCCL's PreMulSum, which gloo does not have.
        values |= {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True}
    elif not GLOO_REDUCES_BY_MEAN and dist.get_backend() == "gloo":
        # By default FSDP2 requests the mean from gloo and receives the sum: pytorch/pytorch#162338.
        values = {"force_sum_reduction_for_comms": True, **values}
    for name, value in values.items():
        for module in sharded:
            require_method(f"set_{name}", module)(value)
    set_prefetches(sharded, config)
    if config.options.get("unshard_in_backward") is False:
        for module in sharded:
            if isinstance(module, nn.Embedding):
                module.set_unshard_in_backward(False)


def set_prefetches(sharded: Sequence[FSDPModule], config: EngineConfig) -> None:
    """Make each module prefetch the next modules of ``sharded`` in forward, and the previous modules in backward."""
    for index, module in enumerate(sharded):
        if (count := config.options.get("forward_prefetch")) is not None:
            module.set_modules_to_forward_prefetch(list(sharded[index + 1 : index + 1 + count]))
        if (count := config.options.get("backward_prefetch")) is not None:
            before = sharded[max(0, index - count) : index]
            module.set_modules_to_backward_prefetch(list(reversed(before)))
