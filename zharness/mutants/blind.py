"""Engines that were broken by somebody who knew the Engine protocol and had not seen the checks.

They were tried on the checks as they were; what survived then sharpened them, and says so here.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from zharness.engines import EngineConfig, EngineFactory
from zharness.mutants import blind_replicated, blind_sharded
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target
from zharness.parity import Part


class Blind(Around):
    """An engine that a factory has broken already."""

    factory: ClassVar[EngineFactory]

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.config = config
        self.right = type(self).factory(model, config)
        self.module = self.right.module
        self.capabilities = self.claims(self.right.capabilities)


def blind(
    factory: EngineFactory, over: str, stages: tuple[int, ...], kind: Kind, *targets: Target, equivalent: str = ""
) -> Mutant:
    """The mutant that ``factory`` makes of ``over`` at ``stages``; ``equivalent`` says why no target can kill it."""
    words = factory.__name__.split("_")
    name = "".join(word[0].upper() + word[1:] for word in words)
    facts = {"factory": staticmethod(factory), "over": over, "stages": stages, "__doc__": factory.__doc__}
    return Mutant(type(name, (Blind,), facts), kind, targets, equivalent=equivalent)


ALL, SHARDED = (0, 1, 2, 3), (1, 2, 3)
LOCAL, GATHER, OPTIMIZER = Part.LOCAL_GRADIENT, Part.GATHER, Part.OPTIMIZER
sharded, replicated = blind_sharded, blind_replicated

MUTANTS = (
    blind(
        sharded.idle_parameter_gets_zeros,
        "reference",
        ALL,
        Kind.PARAMETERS,
        Target("parameters.stay_put", OPTIMIZER, "changing", parameter="branch.*"),
    ),
    blind(
        sharded.unfrozen_stays_put,
        "reference",
        ALL,
        Kind.PARAMETERS,
        Target("parameters.unfrozen", OPTIMIZER, "odd", parameter="frozen.*"),
    ),
    blind(
        sharded.mean_over_users,
        "reference",
        (0, 1, 2),
        Kind.SCALE,
        Target("parameters.used_on_some_ranks", Part.REDUCTION, "changing", parameter="branch.*"),
    ),
    blind(
        sharded.scalar_is_summed,
        "reference",
        ALL,
        Kind.SCALE,
        Target("parameters.every_kind", Part.REDUCTION, "odd", parameter="scalar"),
    ),
    blind(
        sharded.strided_in_memory_order,
        "reference",
        SHARDED,
        Kind.SHARDS,
        Target("parameters.every_kind", Part.REDUCTION, "odd", parameter="transposed"),
    ),
    blind(
        sharded.norm_misses_the_tail,
        "reference",
        SHARDED,
        Kind.CLIPPING,
        Target("training.clip_and_norm", Part.REDUCTION, parameter="norm"),
    ),
    blind(
        sharded.second_no_sync_begins_anew,
        "reference",
        (0, 1),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        sharded.boundary_counts_backwards,
        "reference",
        ALL,
        Kind.CONTRIBUTION,
        Target("training.several_backwards", OPTIMIZER, variant="window"),
    ),
    blind(
        sharded.skipped_step_ages_adam,
        "reference",
        ALL,
        Kind.LOSS_SCALE,
        Target("precision.grad_scaler", OPTIMIZER, "mixed", "fp16", parameter="*/step"),
    ),
    blind(
        sharded.evaluation_keeps_weights,
        "reference",
        (3,),
        Kind.RESOURCES,
        Target("training.forward_alone", GATHER, variant="no_grad"),
    ),
    blind(
        sharded.load_rounds_masters,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw", dtype="bf16"),
    ),
    blind(
        sharded.load_lags_the_schedule,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", OPTIMIZER, variant="adamw"),
    ),
    blind(
        sharded.load_shares_buffers,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", GATHER, variant="buffers", parameter="seen"),
    ),
    blind(
        sharded.save_draws_random_numbers,
        "reference",
        ALL,
        Kind.STATE,
        Target("state.resume", GATHER, variant="adamw", parameter="random state"),
    ),
    blind(
        sharded.reentrant_end_drops_outer,
        "reference",
        (2,),
        Kind.GRAPH,
        Target("checkpointing.block", None, "blocks", "reentrant", words="missing ['last.weight']"),
    ),
    blind(
        sharded.reduced_once_a_backward,
        "reference",
        (3,),
        Kind.GRAPH,
        Target("torch_func.through_transforms", Part.REDUCTION, "blocks"),
    ),
    blind(
        replicated.ddp_no_sync_leaks,
        "ddp",
        (0,),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.ddp_detaches_keywords,
        "ddp",
        (0,),
        Kind.GRAPH,
        Target("torch_func.has_aux", LOCAL),
    ),
    blind(
        replicated.ddp_schedule_wraps,
        "ddp",
        (0,),
        Kind.OPTIMIZER,
        Target("training.optimizers", OPTIMIZER, variant="long"),
    ),
    blind(
        replicated.ddp_closed_but_held,
        "ddp",
        (0,),
        Kind.RESOURCES,
        Target("resources.close", GATHER, "exact", parameter="model"),
    ),
    blind(
        replicated.fsdp2_forgets_once,
        "fsdp2",
        (2, 3),
        Kind.CONTRIBUTION,
        Target("training.no_sync", Part.REDUCTION),
    ),
    blind(
        replicated.fsdp2_root_averages,
        "fsdp2",
        (2, 3),
        Kind.SCALE,
        Target("training.sum_or_mean", Part.REDUCTION, "transformer"),
    ),
    blind(
        replicated.fsdp2_evaluation_goes_stale,
        "fsdp2",
        (3,),
        Kind.STALE,
        Target("training.forward_alone", GATHER, variant="no_grad"),
    ),
    blind(
        replicated.fsdp2_clips_by_group,
        "fsdp2",
        (2, 3),
        Kind.CLIPPING,
        Target("training.optimizers", OPTIMIZER, variant="long"),
    ),
)
