"""List the sections of DeepSpeed's JSON that this engine supports, with the names and defaults of DeepSpeed 0.19.8."""

from __future__ import annotations

from zharness.reference.buckets import DEFAULT_BUCKET_SIZE
from zharness.reference.deepspeed_json import schema
from zharness.reference.deepspeed_json.schema import (
    FixedKey,
    Key,
    Section,
    choice_parser,
    integer_parser,
    parse_dtype,
    parse_flag,
    parse_number,
)
from zharness.reference.layout import STAGES


def parse_elements(path: str, value: object) -> int:
    """Return a number of elements as an integer. DeepSpeed's files often write it as a float, such as 5e8."""
    return int(parse_number(path, value))


NO_QUANTIZATION = FixedKey(False, "the reference engine quantizes nothing")

OFFLOAD = Section(
    supported_keys={"device": Key(choice_parser("none", "cpu"), "none")},
    # These keys choose the memory for offloaded tensors, and the size of the pieces in which they are copied.
    ignored_keys=frozenset(
        {"buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write"}
    ),
    fixed_keys={
        "ratio": FixedKey(1.0, "all optimizer state is offloaded to one device"),
        "nvme_path": FixedKey(None, "the reference engine cannot offload to NVMe"),
    },
)
ZERO_OPTIMIZATION = Section(
    supported_keys={
        "stage": Key(choice_parser(*STAGES), 0),
        "reduce_bucket_size": Key(parse_elements, DEFAULT_BUCKET_SIZE),
        "stage3_prefetch_bucket_size": Key(parse_elements, DEFAULT_BUCKET_SIZE),
        "mics_shard_size": Key(integer_parser(1)),  # removed in DeepSpeed 0.19.8
        "offload_optimizer": Key(OFFLOAD, {}),
        "offload_param": Key(OFFLOAD, {}),
    },
    # These keys choose how many elements are communicated together, when, and by which calls, where and how long
    # elements are kept, what is printed, and what a file of weights contains. None of them changes a computed number.
    ignored_keys=frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "compute_grad_norm",
            "contiguous_gradients",
            "enable_sanity_checks",
            "leaf_module",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "overlap_comm",
            "override_module_apply",
            "parameter_alignment",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        }
    ),
    fixed_keys={
        "cpu_offload": FixedKey(False, "use offload_optimizer: {'device': 'cpu'}"),
        "elastic_checkpoint": FixedKey(False, "every checkpoint loads at any world size"),
        "ignore_unused_parameters": FixedKey(True, "an unused parameter is not an error and is not updated"),
        "load_from_fp32_weights": FixedKey(True, "master weights are loaded from the checkpoint's master weights"),
        "legacy_stage1": FixedKey(False, "stage 1 has only one implementation"),
        "pipeline_loading_checkpoint": FixedKey(False, "a checkpoint is read completely before it is loaded"),
        "save_muon_momentum_buffer_in_memory": FixedKey(False, "Muon cannot work on shards"),
        "zenflow": FixedKey(None, "every update is made in its own step"),
        "zero_hpz_partition_size": FixedKey(1, "parameters are sharded over all ranks"),
        "zero_quantized_gradients": NO_QUANTIZATION,
        "zero_quantized_nontrainable_weights": NO_QUANTIZATION,
        "zero_quantized_weights": NO_QUANTIZATION,
    },
)
FP16 = Section(
    supported_keys={
        "enabled": Key(parse_flag, False),
        "auto_cast": Key(parse_flag, False),
        "loss_scale": Key(parse_number, 0),
        "initial_scale_power": Key(integer_parser(0), 16),
        "loss_scale_window": Key(integer_parser(1), 1000),
        # DeepSpeed's default is 2; without the key the scale moves as torch.amp.GradScaler's does.
        "hysteresis": Key(integer_parser(1), 1),
        "consecutive_hysteresis": Key(parse_flag, False),
        "min_loss_scale": Key(parse_number, 1),
        "fp16_master_weights_and_grads": Key(parse_flag, False),
    }
)
BF16 = Section(
    supported_keys={
        "enabled": Key(parse_flag, False),
        "check_grad_overflow": Key(parse_flag, True),
        "bf16_master_weights_and_grads": Key(parse_flag, False),
        "bf16_optimizer_states": Key(parse_flag, False),
    },
    ignored_keys=frozenset({"immediate_grad_update"}),  # chooses when a gradient is copied, not how it is accumulated
)
TORCH_AUTOCAST = Section(
    supported_keys={
        "enabled": Key(parse_flag, False),
        "dtype": Key(parse_dtype, "bf16"),
        "lower_precision_safe_modules": Key(schema.parse_names),
    }
)
TYPE_AND_PARAMS = Section(
    supported_keys={"type": Key(lambda _, value: str(value)), "params": Key(schema.parse_arguments, {})},
    fixed_keys={"legacy_fusion": FixedKey(False, "the reference engine has no fused optimizers")},
)
# These keys configure DeepSpeed's own checkpointing functions; torch.utils.checkpoint in a model needs no keys.
MODEL_CHECKPOINTS_ITSELF = "the model checkpoints activations itself, with torch.utils.checkpoint"
ACTIVATION_CHECKPOINTING = Section(
    supported_keys={},
    ignored_keys=frozenset({"profile"}),
    fixed_keys={
        "partition_activations": FixedKey(False, MODEL_CHECKPOINTS_ITSELF),
        "contiguous_memory_optimization": FixedKey(False, MODEL_CHECKPOINTS_ITSELF),
        "cpu_checkpointing": FixedKey(False, MODEL_CHECKPOINTS_ITSELF),
        "number_checkpoints": FixedKey(None, MODEL_CHECKPOINTS_ITSELF),
        "synchronize_checkpoint_boundary": FixedKey(False, MODEL_CHECKPOINTS_ITSELF),
    },
)
CHECKPOINT = Section(
    supported_keys={},
    ignored_keys=frozenset(
        {"tag_validation"}
    ),  # chooses whether different tags on the ranks are a warning or an error; this engine always raises an error
    fixed_keys={
        "load_universal": FixedKey(False, "call engine.load_universal_checkpoint(path) instead"),
        "use_node_local_storage": FixedKey(False, "all ranks share one file system"),
        "parallel_write": FixedKey({"pipeline_stage": False}, "every rank writes its own part of a checkpoint"),
        "writer": FixedKey(None, "torch.distributed.checkpoint writes the files"),
    },
)
TOP_LEVEL = Section(
    supported_keys={
        "train_batch_size": Key(integer_parser(1)),
        "train_micro_batch_size_per_gpu": Key(integer_parser(1)),
        "gradient_accumulation_steps": Key(integer_parser(1)),
        # DeepSpeed clips at 1.0 without the key since 0.19.3; here no key means no limit, as in torch.
        "gradient_clipping": Key(parse_number, 0),
        "gradient_allreduce_op": Key(choice_parser("mean", "sum"), "mean"),
        "communication_data_type": Key(parse_dtype),
        "data_types": Key(Section({"grad_accum_dtype": Key(parse_dtype)}), {}),
        "dataloader_drop_last": Key(parse_flag, False),
        "zero_allow_untested_optimizer": Key(parse_flag, False),
        "optimizer": Key(TYPE_AND_PARAMS),
        "scheduler": Key(TYPE_AND_PARAMS),
        "zero_optimization": Key(ZERO_OPTIMIZATION, {}),
        "activation_checkpointing": Key(ACTIVATION_CHECKPOINTING, {}),
        "checkpoint": Key(CHECKPOINT, {}),
        "fp16": Key(FP16, {}),
        "bf16": Key(BF16, {}),
        "torch_autocast": Key(TORCH_AUTOCAST, {}),
    },
    # These keys choose what is printed or measured, and how often.
    ignored_keys=frozenset(
        {
            "disable_python_gc",
            "dump_state",
            "log_level",
            "memory_breakdown",
            "steps_per_print",
            "wall_clock_breakdown",
            "zero_force_ds_cpu_optimizer",
        }
    ),
    fixed_keys={
        "disable_allgather": FixedKey(False, "updated parameters are always all-gathered"),
        "gradient_predivide_factor": FixedKey(1.0, "the sum of gradients is divided once, after it is complete"),
        "managed_gradient_accumulation": FixedKey(
            True, "step() counts micro-batches; to count them yourself, set gradient_accumulation_steps to 1"
        ),
        "prescale_gradients": FixedKey(False, "the sum of gradients is divided once, after it is complete"),
        "seq_parallel_communication_data_type": FixedKey("fp32", "the reference engine has no sequence parallelism"),
        "sparse_gradients": FixedKey(False, "the reference engine reduces dense gradients"),
    },
    disabled_sections=frozenset(
        {
            *("amp", "autotuning", "comms_logger", "compression_training", "csv_monitor"),
            *("curriculum_learning", "data_efficiency", "eigenvalue", "elasticity", "flops_profiler", "hybrid_engine"),
            *("pipeline", "progressive_layer_drop", "sparse_attention", "tensorboard", "tensor_parallel", "wandb"),
        }
    ),
)
