"""Define the law state.one_folder: a load restores the last of several saves to its folder.

An engine restores an older state if it remembers which checkpoint a folder had, or if it does not save again at the
same number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Engine, Feature, require_gathered
from zharness.engines.tensor_access import require_write_in
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import PLAIN_ADAMW
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.access.common import optimizer_weights, trained_names
from zharness.laws.state.common import record_snapshot, train_steps
from zharness.parity import Comparison, Part, Tier

LOADED, EDITED, WRITTEN = "loaded_between", "edited_between", "written_between"
PARTS = {"params": Part.GATHER, "masters": Part.OPTIMIZER, "state": Part.OPTIMIZER, "facts": Part.OPTIMIZER}


def observe_one_folder(ctx: RankContext) -> None:
    """Save to one folder twice, make the law variant's change between both saves, and load after a further step."""
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    train_steps(ctx, engine, range(1), "before")
    with shared_folder() as folder:
        engine.save(folder)
        if ctx.variant == LOADED:
            engine.load(folder)
            train_steps(ctx, engine, range(1, 2), "between")
        elif ctx.variant == EDITED:
            edit_weights(engine)
        elif ctx.variant == WRITTEN:
            write_weights(engine)
        record_snapshot(ctx, engine, 0, "saved")
        engine.save(folder)
        train_steps(ctx, engine, range(2, 3), "after")
        engine.load(folder)
        record_snapshot(ctx, engine, 0, "loaded")
    engine.close()


@torch.no_grad()
def edit_weights(engine: Engine) -> None:
    """Negate every trained weight in ``gathered``, which changes no number of steps."""
    with require_gathered(engine).gathered(trained_names(engine)) as weights:
        for weight in weights.values():
            weight.neg_()


def write_weights(engine: Engine) -> None:
    """Replace every trained weight by its negative, which changes no number of steps."""
    for name, weight in optimizer_weights(engine).items():
        require_write_in(engine).write_param(name, -weight)


def judge_one_folder(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights, optimizer state, learning rates and loss scale after the load with those of the last save."""
    for what, part in PARTS.items():
        yield from compare_records(ctx, f"{what}-saved", f"{what}-loaded", 0, 0, part)


LAWS = (
    Law(
        name="state.one_folder",
        statement="a load restores the last of several saves to one folder, even if two saves have the same step count",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_one_folder,
        judge=judge_one_folder,
        features=(Feature.CHECKPOINT,),
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=(
            Variant(LOADED, compares_engine_with_itself=True),
            Variant(EDITED, (Feature.EDITS,), compares_engine_with_itself=True),
            Variant(WRITTEN, (Feature.WRITE_IN, Feature.WRITE_IN_FORWARD), compares_engine_with_itself=True),
        ),
        kept_because="the only law that loads from one folder twice, and that saves twice at the same step count",
    ),
)
