"""List the options of DeepSpeed that zharness can set, the stages where each has an effect, and what each excludes.

Every statement about an option follows DeepSpeed 0.19.8's own checks and documentation (``runtime/zero/config.py``,
``runtime/zero/offload_config.py``, ``runtime/config.py``). DeepSpeed is not imported here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zharness.device import is_gpu_requested
from zharness.engines.capabilities import EngineOption, Feature
from zharness.engines.deepspeed_machine import missing_for_cpu_adam, missing_for_fused_adam, missing_for_nvme
from zharness.engines.gpu_options import NO_GPU
from zharness.engines.json_variants import JSON_VARIANTS, STAGE_3_JSON_VARIANTS, zero_optimization

# Options of the adapter, which are not keys of DeepSpeed's JSON.
CPU_ADAM = "cpu_adam"  # build DeepSpeedCPUAdam in place of torch's Adam and AdamW
FUSED_ADAM = "fused_adam"  # build DeepSpeed's FusedAdam in place of torch's Adam and AdamW
JSON_OPTIMIZER = "json_optimizer"  # let DeepSpeed build the optimizer from the section "optimizer"
LEAF_MODULES = "leaf_modules"  # make leaf modules with deepspeed.utils.set_z3_leaf_modules
JSON_SCHEDULER = "json_scheduler"  # let DeepSpeed build a warm-up schedule from the section "scheduler"
OFFLOAD_STATES = "offload_states"  # call offload_states() and reload_states() after each step
TENSOR_RATES = "tensor_rates"  # give the optimizer learning rates that are tensors
UNSCALED_BACKWARD = "unscaled_backward"  # the caller divides the loss and passes scale_wrt_gas=False
UNIVERSAL_CHECKPOINT = "universal_checkpoint"  # convert a saved checkpoint with ds_to_universal, and load the result
UNWRAPPED = "unwrapped"  # enter and leave unwrap_model_for_generation after each step
ZERO_INIT = "zero_init"  # partition the model with deepspeed.zero.Init before initialize

_SWAP_FOLDER = str(Path(tempfile.gettempdir()) / "zharness-nvme")

SHARDED = frozenset({1, 2, 3})
STAGES_1_AND_2 = frozenset({1, 2})
STAGE_3 = frozenset({3})

_LEAF_REFUSALS: Mapping[Feature, str] = {
    Feature.SUBMODULES: "a leaf module gets hooks and its children get none ('ZeRO3 will prefetch parameters for all "
    "child modules upon entering the module', set_z3_leaf_modules)",
}


# Models with a submodule that contains modules, so that this submodule, and not only the whole model, can be a leaf
# module.
_NESTED_MODELS = frozenset({"transformer"})


@dataclass(frozen=True)
class StagedOption:
    """An option of DeepSpeed, and the stages at which it has an effect and DeepSpeed accepts it."""

    stages: frozenset[int]
    option: EngineOption


def staged(stages: frozenset[int], options: Mapping[str, Any], **facts: Any) -> StagedOption:
    """Return an option with ``facts``, the further arguments of EngineOption."""
    return StagedOption(stages, EngineOption(options, **facts))


def offload_optimizer(device: str, **section: Any) -> dict[str, Any]:
    """Return options that keep optimizer state on ``device``, and allow an optimizer other than DeepSpeed's own."""
    return {
        **zero_optimization(offload_optimizer={"device": device, **section}),
        "zero_force_ds_cpu_optimizer": False,
    }


_OFFLOAD_REFUSALS: Mapping[Feature, str] = {
    Feature.MASTERS: "bf16_master_weights_and_grads with offloading 'requires ZeRO-2 Offload with DeepSpeedCPUAdam' "
    "(stage_1_and_2.py, _enforce_cpu_offload)",
}

# The laws that train with Adam or AdamW and do not replay torch's own operations. DeepSpeedCPUAdam computes 1 - beta in
# fp32. So a replay differs by a few units in the last place unless beta is a power of two.
_LAWS_OF_CPU_ADAM = frozenset(
    {
        "access.read_state-adam",
        "access.write_state-adam",
        "state.resume-adamw",
        "training.caller_modes",
        "training.looked_at",
    }
)

OFFLOAD_OPTIONS: Mapping[str, StagedOption] = {
    "offload_optimizer": staged(SHARDED, offload_optimizer("cpu"), refuses=_OFFLOAD_REFUSALS),
    "offload_unpinned": staged(SHARDED, offload_optimizer("cpu", pin_memory=False), refuses=_OFFLOAD_REFUSALS),
    "cpu_adam": staged(
        SHARDED,
        {**offload_optimizer("cpu"), CPU_ADAM: True},
        absent=missing_for_cpu_adam(),
        changes_numbers="DeepSpeedCPUAdam contracts multiplications and additions of Adam's update",
        excludes={"json_optimizer": "DeepSpeed takes an optimizer from its JSON or from the caller"},
        laws=_LAWS_OF_CPU_ADAM,
        laws_reason="the other laws use another optimizer, or replay torch's own operations, from which "
        "DeepSpeedCPUAdam differs by a few units in the last place",
    ),
    "fused_adam": staged(
        frozenset({0, 1, 2, 3}),
        {FUSED_ADAM: True},
        absent=missing_for_fused_adam(),
        changes_numbers="FusedAdam contracts multiplications and additions of Adam's update",
        excludes=dict.fromkeys(
            ("json_optimizer", "cpu_adam", "offload_optimizer", "offload_unpinned", "offload_nvme"),
            "FusedAdam updates weights on the GPU, and is passed by the caller",
        ),
        laws=_LAWS_OF_CPU_ADAM,
        laws_reason="the other laws use another optimizer, or replay torch's own operations, from which FusedAdam "
        "differs by a few units in the last place",
    ),
    "offload_states": staged(
        SHARDED,
        {OFFLOAD_STATES: True},
        excludes={
            **dict.fromkeys(
                ("offload_param", "offload_param_nvme"),
                "'Moving states across devices is not supported for offloaded parameters' (engine.py)",
            ),
            **dict.fromkeys(
                ("offload_optimizer", "offload_unpinned", "offload_nvme", "cpu_adam"),
                "'not supported for offloaded optimizer states' (engine.py of 0.18.4)",
            ),
            **dict.fromkeys(
                ("accumulate_fp32", "immediate_grad_update"), "BF16_Optimizer of stage 1 has no offload_states"
            ),
            "step_is_boundary": "is_gradient_accumulation_boundary() 'is True only while step() runs', so that the "
            "adapter cannot ask it which step ends a window",
        },
    ),
    "offload_param": staged(STAGE_3, zero_optimization(offload_param={"device": "cpu"})),
    "offload_param_unpinned": staged(
        STAGE_3,
        zero_optimization(offload_param={"device": "cpu", "pin_memory": False}),
        absent="" if is_gpu_requested() else NO_GPU,
    ),
    "offload_nvme": staged(STAGE_3, offload_optimizer("nvme", nvme_path=_SWAP_FOLDER), absent=missing_for_nvme()),
    "offload_param_nvme": staged(
        STAGE_3,
        zero_optimization(offload_param={"device": "nvme", "nvme_path": _SWAP_FOLDER}),
        absent=missing_for_nvme(),
    ),
}

# A bug of 0.19.8 that changes a number that training.config_invariance reads. That law would stop at this number and
# hide later bugs, so it leaves the option out. Other laws run with the option
# (zharness/expected_failures/deepspeed_options.toml).
_PREDIVIDED_TWICE = "at stage 3, gradients stay divided by a factor that equals the world size"

# The factors 2 and 4 are exact. At stages 2 and 3 DeepSpeed accepts the options only without reduce-scatter. If
# gradients are reduced by sum, DeepSpeed ignores the options.
PREDIVISION_OPTIONS: Mapping[str, StagedOption] = {
    **{
        f"predivide_by_{factor}": staged(
            frozenset({0, 1, 2, 3}),
            {"gradient_predivide_factor": float(factor), **zero_optimization(reduce_scatter=False)},
            known_bug=_PREDIVIDED_TWICE if factor == 2 else "",
        )
        for factor in (2, 4)
    },
    "prescale_gradients": staged(
        frozenset({0, 1, 2, 3}),
        {"prescale_gradients": True, **zero_optimization(reduce_scatter=False)},
        changes_numbers="each rank divides before the sum, which rounds unless the world size is a power of two",
    ),
}

DTYPE_OPTIONS: Mapping[str, StagedOption] = {
    "accumulate_fp32": staged(
        SHARDED,
        {"data_types": {"grad_accum_dtype": "fp32"}},
        changes_numbers="gradients of a bf16 model are accumulated in fp32",
        dtypes=frozenset({"bf16"}),
    ),
    "immediate_grad_update": staged(
        frozenset({1}),
        {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"immediate_grad_update": True}},
        changes_numbers="gradients of a bf16 model are accumulated in fp32",
        dtypes=frozenset({"bf16"}),
    ),
    "reduce_bf16": staged(
        frozenset({0, 1, 2, 3}),
        {"communication_data_type": "bf16"},
        changes_numbers="gradients are reduced in bf16",
        reduce_dtypes={"fp32": "bf16"},
        dtypes=frozenset({"fp32"}),
        refuses={Feature.AUTOCAST: "torch_autocast determines the reduce dtype itself"},
    ),
    "reduce_fp32": staged(
        frozenset({0, 1, 2, 3}),
        {"communication_data_type": "fp32"},
        changes_numbers="gradients of a bf16 model are reduced in fp32",
        dtypes=frozenset({"bf16"}),  # the reduced gradients are stored in bf16, so that bf16's bound applies
    ),
}

STAGE_1_AND_2_OPTIONS: Mapping[str, StagedOption] = {
    "round_robin_gradients": staged(STAGES_1_AND_2, zero_optimization(round_robin_gradients=True)),
    "parameter_alignment": staged(STAGES_1_AND_2, zero_optimization(parameter_alignment=True)),
    "single_rank_buckets": staged(STAGES_1_AND_2, zero_optimization(use_multi_rank_bucket_allreduce=False)),
    "gather_bucket_0": staged(STAGES_1_AND_2, zero_optimization(allgather_bucket_size=0)),
    "gather_bucket_2": staged(STAGES_1_AND_2, zero_optimization(allgather_bucket_size=2)),
    "no_grad_norm": staged(
        STAGES_1_AND_2,
        # DeepSpeed refuses compute_grad_norm=false together with offloading, so the option also sets the optimizer's
        # device.
        zero_optimization(compute_grad_norm=False, offload_optimizer={"device": "none"}),
        refuses={Feature.CLIP: "compute_grad_norm=false requires gradient_clipping=0"},
        excludes=dict.fromkeys(
            ("accumulate_fp32", "immediate_grad_update"),
            "zero_optimization.compute_grad_norm=false does not support ZeRO Stage 1 with BF16 parameters and FP32 "
            "gradient accumulation",
        ),
    ),
    "elastic_checkpoint": staged(STAGES_1_AND_2, zero_optimization(elastic_checkpoint=True)),
}

STAGE_3_OPTIONS: Mapping[str, StagedOption] = {
    "sub_groups_of_0": staged(STAGE_3, zero_optimization(sub_group_size=0)),
    "sub_groups_of_20": staged(STAGE_3, zero_optimization(sub_group_size=20)),
    "no_reuse": staged(STAGE_3, zero_optimization(stage3_max_reuse_distance=0)),
    "no_live_parameters": staged(STAGE_3, zero_optimization(stage3_max_live_parameters=0)),
    # On one rank DeepSpeed fetches nothing.
    "all_reduce_fetch": staged(
        STAGE_3, zero_optimization(stage3_use_all_reduce_for_fetch_params=True), world_size_factor=2
    ),
    "sequential_gathers": staged(STAGE_3, zero_optimization(stage3_allgather_sequential=True)),
    "one_persistent_parameter": staged(
        STAGE_3,
        zero_optimization(stage3_param_persistence_threshold=10**9, stage3_model_persistence_threshold=100),
    ),
    "leaf_modules": staged(STAGE_3, {LEAF_MODULES: True}, refuses=_LEAF_REFUSALS, models=_NESTED_MODELS),
    "granularity_threshold": staged(
        STAGE_3,
        # In each model of the workload, the whole model has the fewest parameters per module. So any threshold that has
        # an effect makes the whole model one leaf module.
        zero_optimization(stage3_module_granularity_threshold=10**9),
        refuses=_LEAF_REFUSALS,
        laws=frozenset({"training.grads", "training.kernels", "backward.engine_backward"}),
        laws_reason="every backward of a whole model that is one leaf module crashes, so that the other laws would "
        "repeat that crash",
    ),
    "secondary_shards": staged(STAGE_3, zero_optimization(zero_hpz_partition_size=2), world_size_factor=2),
    "torch_linear": staged(
        STAGE_3,
        zero_optimization(memory_efficient_linear=False),
        has_torch_kernels=True,
        refuses={
            Feature.AUTOCAST: "'Gradients for allreduce (reduce-scatter) and parameters for allgather (only for ZeRO3) "
            "of lower_precision_safe_modules are also downcasted to this dtype.' (docs/code-docs/source/training.rst)"
        },
    ),
    "sanity_checks": staged(STAGE_3, zero_optimization(enable_sanity_checks=True)),
}

# The law variants whose schedules DeepSpeed's own schedulers can make.
_SCHEDULED = frozenset(f"training.optimizer_options-*_{name}*" for name in ("warm_up", "range_test", "one_cycle"))
_OTHER_SCHEDULES = "the schedules of the other laws are not those of DeepSpeed's own schedulers"

OTHER_OPTIONS: Mapping[str, StagedOption] = {
    "json_optimizer": staged(frozenset({0, 1, 2, 3}), {JSON_OPTIMIZER: True}),
    "universal_checkpoint": staged(SHARDED, {UNIVERSAL_CHECKPOINT: True}, allows=frozenset({Feature.MESH_RESHARD})),
    "unwrapped": staged(STAGE_3, {UNWRAPPED: True}),
    "unscaled_backward": staged(frozenset({0, 1, 2, 3}), {UNSCALED_BACKWARD: True}),
    # zero.Init with a whole model partitions the model and does not change its dtype.
    "zero_init": staged(STAGE_3, {ZERO_INIT: True}, dtypes=frozenset({"fp32"})),
    "json_scheduler": staged(
        frozenset({0, 1, 2, 3}), {JSON_SCHEDULER: True}, laws=_SCHEDULED, laws_reason=_OTHER_SCHEDULES
    ),
    "json_scheduler_tensor_rates": staged(
        frozenset({0, 1, 2, 3}),
        {JSON_SCHEDULER: True, TENSOR_RATES: True},
        excludes={"json_optimizer": "a learning rate in JSON is a number"},
        laws=_SCHEDULED,
        laws_reason=_OTHER_SCHEDULES,
    ),
    "step_is_boundary": staged(
        frozenset({0, 1, 2, 3}),
        {"managed_gradient_accumulation": False},
        refuses={
            Feature.ENGINE_ACCUMULATION: "each step() 'is the caller-owned boundary' (engine.py)",
            Feature.NO_SYNC: "every backward accumulates locally until step()",
        },
        excludes={"overlap_comm": "managed_gradient_accumulation=False supports overlap_comm only with ZeRO stage 2"},
        laws=frozenset(
            {
                "window.*",
                "idle.*",
                "batches.*",
                "engines.*",
                "values.discarded",
                "values.norm_of_tiny",
                "values.not_finite",
                "values.schedule",
                "values.zero_loss*",
            }
        ),
        laws_reason="gradients are reduced in step(), before which the other laws read them",
    ),
}

# Options that report about a run and must not change it. The flops profiler replaces functions of torch during its
# step.
REPORT_OPTIONS: Mapping[str, StagedOption] = {
    "timers": staged(frozenset({0, 1, 2, 3}), {"wall_clock_breakdown": True, "memory_breakdown": True}),
    "comms_logger": staged(frozenset({0, 1, 2, 3}), {"comms_logger": {"enabled": True, "prof_all": True}}),
    "flops_profiler": staged(
        frozenset({0, 1, 2, 3}),
        {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False, "output_file": os.devnull}},
    ),
}

_STAGES_OF_JSON_VARIANTS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(JSON_VARIANTS, SHARDED),
    **dict.fromkeys(STAGE_3_JSON_VARIANTS, STAGE_3),
}

DEEPSPEED_OPTIONS: Mapping[str, StagedOption] = {
    **{name: staged(_STAGES_OF_JSON_VARIANTS[name], options) for name, options in JSON_VARIANTS.items()},
    **OFFLOAD_OPTIONS,
    **PREDIVISION_OPTIONS,
    **DTYPE_OPTIONS,
    **STAGE_1_AND_2_OPTIONS,
    **STAGE_3_OPTIONS,
    **OTHER_OPTIONS,
    **REPORT_OPTIONS,
}


def options_at(stage: int) -> dict[str, EngineOption]:
    """Return the options that have an effect at ``stage``, by name."""
    return {name: entry.option for name, entry in DEEPSPEED_OPTIONS.items() if stage in entry.stages}
