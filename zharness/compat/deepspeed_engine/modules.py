"""Name the modules of DeepSpeed that the stand-in has, and what each one exports."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist

from zharness.compat.deepspeed_engine import (
    accelerator,
    communication,
    configuration,
    engine,
    initialize,
    leaf_modules,
    linear,
    optimizer,
    parameters,
    tensor_fragment,
    unsupported,
)

VERSION = "0.19.8"  # the release whose behaviour the stand-in follows
TORCH_INFO = {"version": "2.13", "cuda_version": "0.0", "nccl_version": "0.0", "bf16_support": True}
_BUILDERS = ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder", "InferenceBuilder")
_LEAF_DEFAULTS = tuple(f"DEFAULT_LEAF_MODULE_{kind}" for kind in ("CLASSES", "NAMES", "NAME_SUFFIXES"))
_UNSUPPORTED = (
    *("MoE", "LayerSpec", "TiedLayerSpec", "FusedAdam", "DeepSpeedCPUAdam", "FusedLamb"),
    *("MultipleAllGatherHandles", "AllGatherHandle", "DeepSpeedZeroConfig", "load_state_dict_from_zero_checkpoint"),
    *("get_fp32_state_dict_from_zero_checkpoint", "clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"),
    *("has_comm_dtype", "get_comm_dtype", "PARAM_COMM_DTYPE_ATTR_NAME", "unwrap_model_for_generation"),
    *("WarmupLR", "OneCycle", "see_memory_usage", "TiledLinear"),
)


def public_names(module: ModuleType) -> dict[str, Any]:
    """Return what ``module`` itself defines, by name, without private names."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def exported_names() -> dict[str, Mapping[str, Any]]:
    """Return the names that each module of the stand-in exports, by the module's dotted name."""
    builders = {name: unsupported.make_builder(name) for name in _BUILDERS}
    missing = {name: unsupported.make_unsupported(name) for name in _UNSUPPORTED}
    fragments = public_names(tensor_fragment)
    leaves = public_names(leaf_modules)
    sharded = public_names(parameters)
    pipeline = {"PipelineModule": unsupported.PipelineModule, **missing}
    optimizers = public_names(optimizer)
    return {
        "": {
            "initialize": initialize.initialize,
            "add_config_arguments": initialize.add_config_arguments,
            "init_distributed": communication.init_distributed,
            "DeepSpeedEngine": engine.DeepSpeedEngine,
            "DeepSpeedConfigError": configuration.DeepSpeedConfigError,
            "get_accelerator": accelerator.get_accelerator,
            "__version__": VERSION,
        },
        "accelerator": public_names(accelerator),
        "checkpoint": {},
        "checkpoint.utils": missing,
        "comm": {**public_names(communication), "__getattr__": lambda name: getattr(dist, name)},
        "comm.torch": {"build_shm_op": communication.build_shm_op},
        "git_version_info": {"torch_info": TORCH_INFO},
        "moe": {},
        "moe.layer": missing,
        "moe.utils": {"split_params_into_different_moe_groups_for_optimizer": initialize.split_moe_groups},
        "ops": {"__compatible_ops__": dict.fromkeys(_BUILDERS, False)},
        "ops.adam": missing,
        "ops.aio": builders,
        "ops.op_builder": builders,
        "pipe": pipeline,
        "runtime": {},
        "runtime.base_optimizer": optimizers,
        "runtime.bf16_optimizer": {"BF16_Optimizer": unsupported.make_unsupported("BF16_Optimizer")},
        "runtime.engine": {"DeepSpeedEngine": engine.DeepSpeedEngine},
        "runtime.fp16": {},
        "runtime.fp16.fused_optimizer": {"FP16_Optimizer": optimizer.FP16_Optimizer},
        "runtime.fp16.unfused_optimizer": {
            "FP16_UnfusedOptimizer": unsupported.make_unsupported("FP16_UnfusedOptimizer")
        },
        "runtime.pipe": {},
        "runtime.pipe.module": pipeline,
        "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 2**20},
        "runtime.torch_autocast": missing,
        "runtime.zero": {**sharded, "unwrap_model_for_generation": missing["unwrap_model_for_generation"]},
        "runtime.zero.config": missing,
        "runtime.zero.linear": public_names(linear),
        "runtime.zero.offload_config": {"OffloadDeviceEnum": unsupported.OffloadDeviceEnum},
        "runtime.zero.leaf_module_config": {name: [] for name in _LEAF_DEFAULTS},
        "runtime.zero.partition_parameters": {
            **missing,
            **sharded,
            "partitioned_param_data_shape": [0],
            "zero_wrapper_for_fp_tensor_constructor": unsupported.keep_constructor,
        },
        "runtime.zero.stage3": optimizers,
        "runtime.zero.stage_1_and_2": optimizers,
        "runtime.zero.utils": {"ZeRORuntimeException": configuration.ZeRORuntimeException},
        "utils": {**fragments, **leaves, "RepeatingLoader": unsupported.RepeatingLoader},
        "utils.torch": {"required_torch_version": configuration.required_torch_version},
        "utils.zero_to_fp32": missing,
        "zero": {**sharded, **leaves, "TiledLinear": missing["TiledLinear"]},
    }


def iter_modules() -> Iterator[ModuleType]:
    """Yield new modules with these names, each set as an attribute of its parent."""
    built: dict[str, ModuleType] = {}
    for name, exports in exported_names().items():
        dotted = f"deepspeed.{name}".rstrip(".")
        module = ModuleType(dotted, "A stand-in of zharness.compat.deepspeed_engine; see docs/deepspeed-engine.md.")
        module.__spec__ = importlib.machinery.ModuleSpec(dotted, None, is_package=True)
        module.__path__ = []
        vars(module).update(exports)
        built[dotted] = module
        parent, _, last = dotted.rpartition(".")
        if parent:
            setattr(built[parent], last, module)
        yield module
