"""Define the law state.reshard: a checkpoint that was saved at one stage can be loaded at every other stage."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_records
from zharness.law_kit.setting import SettingSupport
from zharness.laws.state.common import (
    RESHARD_OPTIMIZER,
    SAVE_STEP,
    judge_next_step,
    record_next_step,
    record_snapshot,
    train_steps,
)
from zharness.parity import Comparison, Part, Tier


def observe_reshard(ctx: RankContext) -> None:
    """Save a checkpoint, load it at every stage that the engine claims, and record the loaded state and one step."""
    source = ctx.build_engine(optimizer=RESHARD_OPTIMIZER)
    train_steps(ctx, source, range(SAVE_STEP), "before")
    record_snapshot(ctx, source, SAVE_STEP, "saved")
    with shared_folder() as folder:
        source.save(folder)
        source.close()
        for stage in sorted(ctx.capabilities.stages):
            target = ctx.build_engine(stage=stage, optimizer=RESHARD_OPTIMIZER)
            target.load(folder)
            record_next_step(ctx, target, f"stage{stage}")
            target.close()


def judge_reshard(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that each stage loaded the saved weights and state bitwise, and judge its next step."""
    for label in (f"stage{stage}" for stage in range(4)):
        if ctx.has_record(f"params-{label}"):
            for weights in ("params", "masters"):
                yield from compare_records(
                    ctx, f"{weights}-saved", f"{weights}-{label}", SAVE_STEP, SAVE_STEP, Part.GATHER
                )
            yield from compare_records(ctx, "state-saved", f"state-{label}", SAVE_STEP, SAVE_STEP, Part.OPTIMIZER)
            yield from judge_next_step(ctx, label)


LAWS = (
    Law(
        name="state.reshard",
        statement="every stage loads a checkpoint of any other stage bitwise, and the next step is plain PyTorch's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_reshard,
        judge=judge_reshard,
        features=(Feature.CHECKPOINT, Feature.RESHARD, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        judges_split_sums=True,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that saves at one stage and loads at another",
    ),
)
