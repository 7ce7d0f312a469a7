"""The sixth blind set: by somebody else again, who knew the Engine protocol alone.

One of its 24, load_unties over DDP, is killed under DDP's find_unused_parameters alone, and is left out: a target names
no variant of an engine.
"""

from __future__ import annotations

from zharness.mutants import blind6_replicated, blind6_sharded
from zharness.mutants.blind import ALL, GATHER, LOCAL, OPTIMIZER, blind
from zharness.mutants.mutant import Kind, Target
from zharness.parity import Part

sharded, replicated = blind6_sharded, blind6_replicated

MUTANTS = (
    blind(
        sharded.mean_over_users_only,
        "reference",
        (0, 1, 2),
        Kind.SCALE,
        Target("parameters.used_on_some_ranks", Part.REDUCTION, "changing", parameter="branch.*"),
    ),
    blind(
        sharded.sparse_rows_overwrite,
        "reference",
        (0, 1, 2),
        Kind.PARAMETERS,
        Target("parameters.sparse", LOCAL, "lookup", parameter="table.weight"),
    ),
    blind(
        sharded.gradients_flat_as_they_lie,
        "reference",
        (0, 1, 2),
        Kind.SHARDS,
        Target("parameters.every_kind", LOCAL, "odd", parameter="transposed"),
    ),
    blind(
        sharded.one_gradient_per_forward,
        "reference",
        (2,),
        Kind.CONTRIBUTION,
        Target("training.several_backwards", Part.ACCUMULATION),
    ),
    blind(
        sharded.tied_counted_twice_in_the_norm,
        "reference",
        ALL,
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, "transformer", parameter="norm"),
    ),
    blind(
        sharded.growth_window_survives_an_overflow,
        "reference",
        ALL,
        Kind.LOSS_SCALE,
        Target("precision.grad_scaler", OPTIMIZER, "mixed", "fp16", parameter="loss"),
    ),
    blind(
        sharded.weights_are_constants_in_transforms,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.through_transforms", None, "blocks", words="does not require grad"),
    ),
    blind(
        sharded.old_graph_reads_new_weights,
        "reference",
        (3,),
        Kind.STALE,
        Target("double_backward.step_between_retained_backwards", LOCAL, "blocks", parameter="refused"),
    ),
    blind(
        sharded.second_derivative_undivided,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.weight_penalty", Part.REDUCTION, "blocks", "reduced", parameter="factor"),
    ),
    blind(
        sharded.micro_batches_add_up_low,
        "reference",
        (2, 3),
        Kind.AUTOCAST,
        Target("precision.master_weights", Part.ACCUMULATION, "mixed", "fp32"),
    ),
    blind(
        sharded.load_merges_the_optimizer_state,
        "reference",
        ALL,
        Kind.STATE,
        Target("training.any_order", None, variant="saved_first", words="reports as state has the wrong names"),
    ),
    blind(
        sharded.load_gives_rank_0s_buffers,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", GATHER, variant="buffers", parameter="seen"),
    ),
    blind(
        sharded.edits_miss_the_master,
        "reference",
        ALL,
        Kind.AUTOCAST,
        Target("training.any_order", GATHER, variant="saved", dtype="bf16"),
    ),
    blind(
        sharded.forwards_are_counted,
        "reference",
        ALL,
        Kind.CONTRIBUTION,
        Target("torch_func.grad", Part.ACCUMULATION),
    ),
    blind(
        sharded.close_leaves_hooks,
        "reference",
        (2,),
        Kind.RESOURCES,
        Target("resources.close", None, "exact", words="own has the wrong names"),
    ),
    blind(
        sharded.once_used_gets_zeros,
        "reference",
        ALL,
        Kind.PARAMETERS,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="branch.*"),
    ),
    blind(
        replicated.same_mask_in_every_forward,
        "ddp",
        (0,),
        Kind.RANKS,
        Target("training.modes", Part.FORWARD, "stateful", parameter="generator"),
    ),
    blind(
        replicated.outputs_are_kept,
        "ddp",
        (0,),
        Kind.RESOURCES,
        Target("resources.no_leak", GATHER, parameter="tensors"),
    ),
    blind(
        replicated.clips_by_the_shards_norm,
        "fsdp2",
        (2, 3),
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, parameter="norm"),
    ),
    blind(
        replicated.eval_leaves_weights_gathered,
        "fsdp2",
        (3,),
        Kind.STALE,
        Target("training.forward_alone", GATHER, variant="no_grad", parameter="loss"),
    ),
    blind(
        replicated.users_autocast_is_switched_off,
        "fsdp2",
        (2, 3),
        Kind.AUTOCAST,
        Target("precision.autocast_nested", Part.FORWARD, "mixed", parameter="loss"),
    ),
    blind(
        replicated.no_sync_outlives_an_exception,
        "fsdp2",
        (2, 3),
        Kind.CONTRIBUTION,
        Target("training.no_sync", None, words="full_grads has the wrong names"),
    ),
    blind(
        replicated.schedule_stays_outside,
        "zero1",
        (1,),
        Kind.OPTIMIZER,
        Target("training.trajectory", OPTIMIZER, variant="adamw"),
    ),
)
