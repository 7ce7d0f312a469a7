"""The third blind set: by somebody else again, who knew the Engine protocol alone.

Two of its 24 are as the first set has them, by name even (mean_over_users, strided_in_memory_order), and are left out.
"""

from __future__ import annotations

from zharness.mutants import blind3_replicated, blind3_sharded
from zharness.mutants.blind import ALL, GATHER, LOCAL, OPTIMIZER, SHARDED, blind
from zharness.mutants.mutant import Kind, Target
from zharness.parity import Part

sharded, replicated = blind3_sharded, blind3_replicated

MUTANTS = (
    blind(
        sharded.window_survives_zero_grad,
        "reference",
        ALL,
        Kind.CONTRIBUTION,
        Target("training.several_backwards", OPTIMIZER, variant="given_up"),
    ),
    blind(
        sharded.evaluation_leaves_prefetch,
        "reference",
        (3,),
        Kind.STALE,
        Target("training.forward_alone", GATHER, variant="no_grad"),
    ),
    blind(
        sharded.masters_from_model_at_load,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw", dtype="bf16"),
    ),
    blind(
        sharded.empty_shard_ends_update,
        "reference",
        SHARDED,
        Kind.SHARDS,
        Target("parameters.unfrozen", OPTIMIZER, "odd"),
    ),
    blind(
        sharded.double_backward_undivided,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.weight_penalty", Part.REDUCTION, "blocks", "reduced"),
    ),
    blind(
        sharded.stale_graph_accepted,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.step_between_retained_backwards", LOCAL, "blocks", parameter="refused"),
    ),
    blind(
        sharded.replaced_buffer_not_saved,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", GATHER, variant="adamw", parameter="seen"),
    ),
    blind(
        sharded.unfrozen_unreduced,
        "reference",
        (0, 1, 2),
        Kind.PARAMETERS,
        Target("parameters.frozen_and_unfrozen", Part.REDUCTION, "changing", parameter="frozen.*"),
    ),
    blind(
        sharded.failed_forward_stays_open,
        "reference",
        (3,),
        Kind.RESOURCES,
        Target("checkpointing.whole_model", GATHER, "blocks", "non_reentrant", parameter="gathered_bytes"),
    ),
    blind(
        sharded.tied_twice_in_norm,
        "reference",
        ALL,
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, "transformer", dtype="bf16", parameter="norm"),
    ),
    blind(
        sharded.looking_unscales,
        "reference",
        ALL,
        Kind.LOSS_SCALE,
        Target("training.trajectory", OPTIMIZER, variant="adamw", dtype="fp16"),
    ),
    blind(
        sharded.second_backward_dropped,
        "reference",
        (2,),
        Kind.CONTRIBUTION,
        Target("training.accumulation", Part.ACCUMULATION, variant="caller"),
    ),
    blind(
        sharded.autograd_grad_counts,
        "reference",
        (0, 1),
        Kind.GRAPH,
        Target("backward.autograd_grad", None, "blocks", words="full_grads has the wrong names"),
    ),
    blind(
        sharded.substituted_weights_ignored,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.functional_call", LOCAL),
    ),
    blind(
        replicated.failed_no_sync_stays_off,
        "ddp",
        (0,),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.zero_grad_leaves_zeros,
        "ddp",
        (0,),
        Kind.PARAMETERS,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="branch.*"),
    ),
    blind(
        replicated.backward_under_autocast,
        "ddp",
        (0,),
        Kind.AUTOCAST,
        Target("precision.autocast_policy", Part.REDUCTION, "mixed"),
    ),
    blind(
        replicated.schedule_moves_first_group,
        "zero1",
        (1,),
        Kind.OPTIMIZER,
        Target("training.trajectory", OPTIMIZER, variant="sgd", parameter="*bias"),
    ),
    blind(
        replicated.load_keeps_first_ranks_state,
        "zero1",
        (1,),
        Kind.STATE,
        Target("state.resume", None, variant="adamw", words="state-resumed has the wrong names"),
    ),
    blind(
        replicated.zero_grad_misses_no_sync,
        "fsdp2",
        (2, 3),
        Kind.CONTRIBUTION,
        Target("training.no_sync", LOCAL),
    ),
    blind(
        replicated.sum_in_root_alone,
        "fsdp2",
        (2, 3),
        Kind.SCALE,
        Target("training.sum_or_mean", Part.REDUCTION),
    ),
    blind(
        replicated.save_draws_a_number,
        "fsdp2",
        (2, 3),
        Kind.RANKS,
        Target("state.resume", GATHER, variant="adamw", parameter="random state"),
    ),
)
