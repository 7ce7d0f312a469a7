"""Engines that were broken by somebody else who knew the Engine protocol alone, when ``blind`` had sharpened the laws.

They were tried on the checks as they were then; what survived sharpened them again.
"""

from __future__ import annotations

from zharness.mutants import blind2_replicated, blind2_sharded
from zharness.mutants.blind import ALL, GATHER, LOCAL, OPTIMIZER, blind
from zharness.mutants.mutant import Kind, Target
from zharness.parity import Part

sharded, replicated = blind2_sharded, blind2_replicated

MUTANTS = (
    blind(
        sharded.flat_bucket_fills_unused,
        "reference",
        (2,),
        Kind.PARAMETERS,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="unused.*"),
    ),
    blind(
        sharded.schedule_moves_on_skipped_step,
        "reference",
        ALL,
        Kind.LOSS_SCALE,
        Target("precision.grad_scaler", OPTIMIZER, "mixed", "fp16", parameter="learning rate*"),
    ),
    blind(
        sharded.load_takes_masters_from_model,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw", dtype="bf16"),
    ),
    blind(
        sharded.zero_grad_keeps_count,
        "reference",
        ALL,
        Kind.CONTRIBUTION,
        Target("training.several_backwards", OPTIMIZER, variant="given_up"),
    ),
    blind(
        sharded.second_order_undivided,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.weight_penalty", Part.REDUCTION, "blocks", "reduced"),
    ),
    blind(
        sharded.no_grad_read_is_cached,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("parameters.branch", None, "changing", words="missing ['by_attribute.weight']"),
    ),
    blind(
        sharded.low_precision_rounds_buffers,
        "reference",
        ALL,
        Kind.AUTOCAST,
        Target("precision.buffers_keep_dtype", None, "mixed", "declared", words="the buffer 'shift'"),
    ),
    blind(
        sharded.evaluation_stays_gathered,
        "reference",
        (3,),
        Kind.RESOURCES,
        Target("training.forward_alone", GATHER, variant="no_grad"),
    ),
    blind(
        sharded.overflow_is_decided_by_each_rank,
        "reference",
        (3,),
        Kind.RANKS,
        Target("precision.grad_scaler", OPTIMIZER, "mixed", "fp16"),
    ),
    blind(
        sharded.sum_forgets_accumulation,
        "reference",
        ALL,
        Kind.SCALE,
        Target("backward.autograd_grad", Part.REDUCTION, "blocks"),
    ),
    blind(
        sharded.backward_runs_in_autocast,
        "reference",
        ALL,
        Kind.AUTOCAST,
        Target("precision.autocast_states", Part.REDUCTION, "mixed"),
    ),
    blind(
        sharded.step_behind_autograds_back,
        "reference",
        ALL,
        Kind.STALE,
        Target("double_backward.step_between_retained_backwards", LOCAL, "blocks"),
    ),
    blind(
        sharded.tiny_parameters_are_not_averaged,
        "reference",
        (1, 2),
        Kind.SCALE,
        Target("parameters.every_kind", Part.REDUCTION, "odd"),
    ),
    blind(
        sharded.users_alone_are_averaged,
        "reference",
        (0, 1),
        Kind.SCALE,
        Target("parameters.used_on_some_ranks", Part.REDUCTION, "changing", parameter="branch.*"),
    ),
    blind(
        sharded.transforms_read_detached,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.through_transforms", None, "blocks", words="does not require grad"),
    ),
    blind(
        sharded.second_arrival_is_dropped,
        "reference",
        (2,),
        Kind.CONTRIBUTION,
        Target("checkpointing.two_regions", Part.REDUCTION, "blocks", "reentrant"),
    ),
    blind(
        replicated.ddp_no_sync_is_left_on,
        "ddp",
        (0,),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.ddp_clips_tied_twice,
        "ddp",
        (0,),
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, "transformer", parameter="norm"),
    ),
    blind(
        replicated.ddp_synchronises_generators,
        "ddp",
        (0,),
        Kind.RANKS,
        Target("training.sgd_step", GATHER, parameter="random state"),
    ),
    blind(
        replicated.fsdp2_layout_of_an_even_split,
        "fsdp2",
        (2, 3),
        Kind.SHARDS,
        Target("training.sgd_step", GATHER, parameter="first.*"),
    ),
    blind(
        replicated.fsdp2_clips_by_local_norm,
        "fsdp2",
        (2, 3),
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, parameter="norm"),
    ),
    blind(
        replicated.fsdp2_load_forgets_buffers,
        "fsdp2",
        (2, 3),
        Kind.STATE,
        Target("state.resume", GATHER, variant="adamw", parameter="seen"),
    ),
    blind(
        replicated.zero1_stale_rates_of_later_groups,
        "zero1",
        (1,),
        Kind.OPTIMIZER,
        Target("training.trajectory", OPTIMIZER, variant="sgd", parameter="*bias"),
    ),
    blind(
        replicated.zero1_load_fills_rank_0_only,
        "zero1",
        (1,),
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw"),
    ),
)
