"""The fourth blind set: by somebody else again, who knew the Engine protocol alone.

Three of its 24 are as an earlier set has them, by name even (tied_twice_in_norm, sum_forgets_accumulation,
stale_graph_accepted), and are left out.
"""

from __future__ import annotations

from zharness.mutants import blind4_replicated, blind4_sharded
from zharness.mutants.blind import ALL, GATHER, LOCAL, OPTIMIZER, blind
from zharness.mutants.mutant import Kind, Target
from zharness.parity import Part

sharded, replicated = blind4_sharded, blind4_replicated

MUTANTS = (
    blind(
        sharded.first_rank_decides,
        "reference",
        (0, 1, 2),
        Kind.PARAMETERS,
        Target("parameters.used_on_some_ranks", None, "changing", "others", words="missing ['branch.bias'"),
    ),
    blind(
        sharded.masters_rounded_on_load,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw", dtype="bf16"),
    ),
    blind(
        sharded.overflow_in_own_shard,
        "reference",
        (3,),
        Kind.LOSS_SCALE,
        Target("precision.grad_scaler", OPTIMIZER, "mixed", "fp16"),
    ),
    blind(
        sharded.undivided_second_order,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.weight_penalty", Part.REDUCTION, "blocks", "reduced"),
    ),
    blind(
        sharded.constants_in_transforms,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.through_transforms", None, "blocks", words="does not require grad"),
    ),
    blind(
        sharded.stand_in_of_no_grad,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("parameters.branch", None, "changing", words="missing ['by_attribute.weight']"),
    ),
    blind(
        sharded.tail_not_published,
        "reference",
        (1, 2),
        Kind.SHARDS,
        Target("training.trajectory", GATHER, variant="adamw", dtype="bf16"),
    ),
    blind(
        sharded.one_step_count_for_all,
        "reference",
        ALL,
        Kind.OPTIMIZER,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="branch.*"),
    ),
    blind(
        sharded.buffers_of_rank_0_after_load,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", GATHER, variant="buffers", parameter="seen"),
    ),
    blind(
        sharded.gradients_in_whole_buffer,
        "reference",
        (2,),
        Kind.RESOURCES,
        Target("resources.memory_per_rank", GATHER, parameter="gradients"),
    ),
    blind(
        sharded.sparse_rows_overwritten,
        "reference",
        (0, 1, 2),
        Kind.PARAMETERS,
        Target("parameters.sparse", LOCAL, "lookup", parameter="table.weight"),
    ),
    blind(
        sharded.unfrozen_not_reduced,
        "reference",
        ALL,
        Kind.PARAMETERS,
        Target("parameters.frozen_and_unfrozen", None, "changing", words="missing ['frozen.bias'"),
    ),
    blind(
        replicated.ddp_no_sync_left_by_exception,
        "ddp",
        (0,),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.ddp_wire_in_bf16,
        "ddp",
        (0,),
        Kind.WIRE,
        Target("training.grads", Part.REDUCTION),
    ),
    blind(
        replicated.ddp_clips_each_group,
        "ddp",
        (0,),
        Kind.CLIPPING,
        Target("training.optimizers", OPTIMIZER, variant="long"),
    ),
    blind(
        replicated.fsdp2_keeps_unreduced,
        "fsdp2",
        (2, 3),
        Kind.CONTRIBUTION,
        Target("training.no_sync", LOCAL),
    ),
    blind(
        replicated.fsdp2_base_rates_after_load,
        "fsdp2",
        (2, 3),
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw"),
    ),
    blind(
        replicated.fsdp2_norm_of_own_shards,
        "fsdp2",
        (2, 3),
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, parameter="norm"),
    ),
    blind(
        replicated.fsdp2_autocast_only_with_grad,
        "fsdp2",
        (2, 3),
        Kind.AUTOCAST,
        Target("precision.autocast_policy", LOCAL, "mixed"),
    ),
    blind(
        replicated.zero1_rate_of_last_step,
        "zero1",
        (1,),
        Kind.OPTIMIZER,
        Target("training.trajectory", OPTIMIZER, variant="adamw"),
    ),
    blind(
        replicated.zero1_seeds_all_ranks,
        "zero1",
        (1,),
        Kind.RANKS,
        Target("training.sgd_step", GATHER, parameter="random state"),
    ),
)
