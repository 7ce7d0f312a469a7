"""The sections of DeepSpeed's JSON that this engine takes; names and defaults as in DeepSpeed 0.19.8."""

from __future__ import annotations

from zharness.reference import schema
from zharness.reference.buckets import SIZE
from zharness.reference.layout import STAGES
from zharness.reference.schema import Fixed, Key, Section, dtype, flag, integer, number, one_of


def elements(path: str, value: object) -> int:
    """A size in elements, which DeepSpeed's files often write as 5e8."""
    return int(number(path, value))


NO_QUANTIZATION = Fixed(False, "nothing is quantized")

OFFLOAD = Section(
    honoured={"device": Key(one_of("none", "cpu"), "none")},
    # From which memory, and in how many pieces.
    harmless=frozenset({"buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write"}),
    fixed={"ratio": Fixed(1.0, "the optimizer works in one place"), "nvme_path": Fixed(None, "there is no NVMe tier")},
)
ZERO = Section(
    honoured={
        "stage": Key(one_of(*STAGES), 0),
        "reduce_bucket_size": Key(elements, SIZE),
        "stage3_prefetch_bucket_size": Key(elements, SIZE),
        "offload_optimizer": Key(OFFLOAD, {}),
        "offload_param": Key(OFFLOAD, {}),
    },
    # How many elements travel together, when, by which calls, from which memory, how long they are kept, what is
    # printed, and what a file of weights holds: never which numbers are computed.
    harmless=frozenset(
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
    fixed={
        "cpu_offload": Fixed(False, "it is spelled offload_optimizer: {'device': 'cpu'} now"),
        "elastic_checkpoint": Fixed(False, "a checkpoint loads at any world size as it is"),
        "ignore_unused_parameters": Fixed(True, "an unused parameter is no error and stays put"),
        "load_from_fp32_weights": Fixed(True, "masters go on from what the checkpoint has of them"),
        "legacy_stage1": Fixed(False, "there is one implementation"),
        "pipeline_loading_checkpoint": Fixed(False, "a checkpoint is read before it is adopted"),
        "save_muon_momentum_buffer_in_memory": Fixed(False, "Muon cannot work on shards"),
        "zenflow": Fixed(None, "every update is made at its step"),
        "zero_hpz_partition_size": Fixed(1, "parameters are sharded over all ranks"),
        "zero_quantized_gradients": NO_QUANTIZATION,
        "zero_quantized_nontrainable_weights": NO_QUANTIZATION,
        "zero_quantized_weights": NO_QUANTIZATION,
    },
)
FP16 = Section(
    honoured={
        "enabled": Key(flag, False),
        "auto_cast": Key(flag, False),
        "loss_scale": Key(number, 0),
        "initial_scale_power": Key(integer(0), 16),
        "loss_scale_window": Key(integer(1), 1000),
        # DeepSpeed's default is 2; without the key the scale moves as torch.amp.GradScaler's does.
        "hysteresis": Key(integer(1), 1),
        "consecutive_hysteresis": Key(flag, False),
        "min_loss_scale": Key(number, 1),
        "fp16_master_weights_and_grads": Key(flag, False),
    }
)
BF16 = Section(
    honoured={
        "enabled": Key(flag, False),
        "check_grad_overflow": Key(flag, True),
        "bf16_master_weights_and_grads": Key(flag, False),
        "bf16_optimizer_states": Key(flag, False),
    },
    harmless=frozenset({"immediate_grad_update"}),  # when a gradient is copied, not how it is added
)
AUTOCAST = Section(
    honoured={
        "enabled": Key(flag, False),
        "dtype": Key(dtype, "bf16"),
        "lower_precision_safe_modules": Key(schema.names),
    }
)
CHOICE = Section(
    honoured={"type": Key(lambda _, value: str(value)), "params": Key(schema.arguments, {})},
    fixed={"legacy_fusion": Fixed(False, "nothing is fused by hand")},
)
# Its own functions ask for it, where a model calls them; a model's use of torch.utils.checkpoint is no matter of keys.
OWN = "a model checkpoints by torch.utils.checkpoint itself"
CHECKPOINTING = Section(
    honoured={},
    harmless=frozenset({"profile"}),
    fixed={
        "partition_activations": Fixed(False, OWN),
        "contiguous_memory_optimization": Fixed(False, OWN),
        "cpu_checkpointing": Fixed(False, OWN),
        "number_checkpoints": Fixed(None, OWN),
        "synchronize_checkpoint_boundary": Fixed(False, OWN),
    },
)
CHECKPOINT = Section(
    honoured={},
    harmless=frozenset({"tag_validation"}),  # how loudly it is told that ranks bring other tags
    fixed={
        "load_universal": Fixed(False, "call load_universal_checkpoint"),
        "use_node_local_storage": Fixed(False, "all ranks see one file system"),
        "parallel_write": Fixed({"pipeline_stage": False}, "every rank writes its own part"),
        "writer": Fixed(None, "torch.distributed.checkpoint writes"),
    },
)
TOP = Section(
    honoured={
        "train_batch_size": Key(integer(1)),
        "train_micro_batch_size_per_gpu": Key(integer(1)),
        "gradient_accumulation_steps": Key(integer(1)),
        # DeepSpeed clips at 1.0 without the key since 0.19.3; here no key means no limit, as in torch.
        "gradient_clipping": Key(number, 0),
        "gradient_allreduce_op": Key(one_of("mean", "sum"), "mean"),
        "communication_data_type": Key(dtype),
        "data_types": Key(Section({"grad_accum_dtype": Key(dtype)}), {}),
        "dataloader_drop_last": Key(flag, False),
        "zero_allow_untested_optimizer": Key(flag, False),
        "optimizer": Key(CHOICE),
        "scheduler": Key(CHOICE),
        "zero_optimization": Key(ZERO, {}),
        "activation_checkpointing": Key(CHECKPOINTING, {}),
        "checkpoint": Key(CHECKPOINT, {}),
        "fp16": Key(FP16, {}),
        "bf16": Key(BF16, {}),
        "torch_autocast": Key(AUTOCAST, {}),
    },
    # How often and how much is printed or measured.
    harmless=frozenset(
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
    fixed={
        "disable_allgather": Fixed(False, "updated parameters are gathered"),
        "gradient_predivide_factor": Fixed(1.0, "a sum is divided once, after it is complete"),
        "managed_gradient_accumulation": Fixed(True, "step() counts micro-batches; leave accumulation at 1 to own it"),
        "prescale_gradients": Fixed(False, "a sum is divided once, after it is complete"),
        "seq_parallel_communication_data_type": Fixed("fp32", "there is no sequence parallelism"),
        "sparse_gradients": Fixed(False, "gradients are dense"),
    },
    disabled=frozenset(
        {
            *("amp", "autotuning", "comms_logger", "compression_training", "csv_monitor"),
            *("curriculum_learning", "data_efficiency", "eigenvalue", "elasticity", "flops_profiler", "hybrid_engine"),
            *("pipeline", "progressive_layer_drop", "sparse_attention", "tensorboard", "tensor_parallel", "wandb"),
        }
    ),
)
