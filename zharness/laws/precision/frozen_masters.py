"""Define the law precision.frozen_masters: weights of a layer frozen after a step equal their rounded masters."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import PLAIN_ADAMW
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.parity import Comparison, Part, Tier, compare_bitwise

LAYER = "first"  # the layer that is frozen after the first step
STEPS = 3  # the layer is frozen during the second step
BEFORE = "-before"  # the end of the labels of records from before a step


def observe_frozen_masters(ctx: RankContext) -> None:
    """Make a step, freeze a layer, make a step, unfreeze the layer, make a step; record weights around each step."""
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    layer = engine.module.get_submodule(LAYER)
    for step in range(STEPS):
        ctx.train(engine, step)
        engine.step()
        engine.zero_grad()
        ctx.record_weights(engine, step)
        layer.requires_grad_(step != 0)
        ctx.record_weights(engine, step + 1, BEFORE)
    engine.close()


def judge_frozen_masters(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare all weights, also frozen ones, with the masters rounded to the dtype of the trained weights."""
    dtypes = {name: weight.dtype for name, weight in ctx.rank_records("params")[0].items()}
    for end, first in (("", 0), (BEFORE, 1)):
        for step in range(first, first + STEPS):
            rank_weights = ctx.rank_records(f"params{end}", step)
            for rank, masters in enumerate(ctx.rank_records(f"masters{end}", step)):
                for name, master in masters.items():
                    place = ctx.location(name, Part.GATHER, step, rank)
                    yield compare_bitwise(place, master.to(dtypes[name]), rank_weights[rank][name])


LAWS = (
    Law(
        name="precision.frozen_masters",
        statement="in low precision, weights of a layer frozen after a step stay equal to their rounded masters",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_frozen_masters,
        judge=judge_frozen_masters,
        features=(Feature.UNFREEZING,),
        weights_stay_integers=False,
        dtypes=("bf16", "fp16"),
        variants=(Variant(compares_engine_with_itself=True),),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only weights in low precision that are read while they are frozen",
    ),
)
