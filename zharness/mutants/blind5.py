"""The fifth blind set: by somebody else again, who knew the Engine protocol alone.

Three of its 24 are as an earlier set has them and are left out: mean_over_users and backward_under_autocast, by name
even, and masters_from_weights, which the third set calls masters_from_model_at_load.
"""

from __future__ import annotations

from zharness.mutants import blind5_replicated, blind5_sharded
from zharness.mutants.blind import ALL, GATHER, LOCAL, OPTIMIZER, blind
from zharness.mutants.mutant import Kind, Target
from zharness.parity import Part

sharded, replicated = blind5_sharded, blind5_replicated

MUTANTS = (
    blind(
        sharded.accumulates_in_model_dtype,
        "reference",
        (2, 3),
        Kind.AUTOCAST,
        Target("precision.master_weights", Part.ACCUMULATION, "mixed", "fp32"),
    ),
    blind(
        sharded.penalty_undivided,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("double_backward.weight_penalty", Part.REDUCTION, "blocks", "reduced", parameter="factor"),
    ),
    blind(
        sharded.clips_before_unscaling,
        "reference",
        ALL,
        Kind.CLIPPING,
        Target("training.clip_and_norm", OPTIMIZER, dtype="fp16"),
    ),
    blind(
        sharded.first_rate_after_load,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw", parameter="learning rate*"),
    ),
    blind(
        sharded.load_keeps_gradients,
        "reference",
        ALL,
        Kind.STATE,
        equivalent="plain PyTorch's load_state_dict keeps the gradients that wait too: zero_grad is what forgets them",
    ),
    blind(
        sharded.stale_in_evaluation,
        "reference",
        (3,),
        Kind.STALE,
        Target("state.resume", Part.FORWARD, variant="adamw", parameter="loss"),
    ),
    blind(
        sharded.own_weights_always,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.functional_call", LOCAL),
    ),
    blind(
        sharded.permuted_weights_mixed_up,
        "reference",
        (1, 2),
        Kind.SHARDS,
        Target("parameters.unfrozen", OPTIMIZER, "odd", parameter="transposed"),
    ),
    blind(
        sharded.mean_by_power_of_two,
        "reference",
        ALL,
        Kind.SCALE,
        Target("training.grads", Part.REDUCTION, dtype="fp16", world_size=3),
    ),
    blind(
        sharded.never_unfrozen,
        "reference",
        ALL,
        Kind.PARAMETERS,
        Target("parameters.unfrozen", LOCAL, "odd", parameter="frozen"),
    ),
    blind(
        sharded.forward_left_by_exception,
        "reference",
        (3,),
        Kind.RESOURCES,
        Target("checkpointing.whole_model", GATHER, "blocks", "non_reentrant", parameter="gathered_bytes"),
    ),
    blind(
        sharded.hooks_after_close,
        "reference",
        (2,),
        Kind.RESOURCES,
        Target("resources.close", None, "exact", words="own has the wrong names: missing ['first.bias'"),
    ),
    blind(
        replicated.no_sync_left_by_exception,
        "ddp",
        (0,),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.zeros_for_none,
        "ddp",
        (0,),
        Kind.PARAMETERS,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="branch.*"),
    ),
    blind(
        replicated.draws_in_step,
        "ddp",
        (0,),
        Kind.RANKS,
        Target("training.sgd_step", GATHER, parameter="random state"),
    ),
    blind(
        replicated.tied_clipped_twice,
        "zero1",
        (1,),
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, "transformer", parameter="norm"),
    ),
    blind(
        replicated.schedule_of_the_outer_optimizer,
        "zero1",
        (1,),
        Kind.OPTIMIZER,
        Target("training.trajectory", OPTIMIZER, variant="adamw"),
    ),
    blind(
        replicated.keeps_outputs,
        "zero1",
        (1,),
        Kind.RESOURCES,
        Target("resources.no_leak", GATHER, parameter="tensors"),
    ),
    blind(
        replicated.unreduced_survive_zero_grad,
        "fsdp2",
        (2, 3),
        Kind.CONTRIBUTION,
        Target("training.no_sync", LOCAL),
    ),
    blind(
        replicated.sum_but_in_the_root,
        "fsdp2",
        (2, 3),
        Kind.SCALE,
        Target("training.sum_or_mean", Part.REDUCTION, "transformer"),
    ),
    blind(
        replicated.masters_rounded_by_step,
        "fsdp2",
        (2, 3),
        Kind.AUTOCAST,
        Target("training.trajectory", OPTIMIZER, variant="adamw", dtype="bf16"),
    ),
)
