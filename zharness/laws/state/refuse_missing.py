"""Define the law state.refuse_missing: a load without a checkpoint raises on every rank, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import PLAIN_ADAMW
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_actions import collect_training_state, load_raises, run_on_rank_0, shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.laws.state.common import compare_changes, record_changes, train_steps
from zharness.parity import Comparison, Part, Tier, compare_bitwise

EMPTY, ABSENT = "empty", "absent"  # a folder without files, and a path that does not exist


def observe_refuse_missing(ctx: RankContext) -> None:
    """Load from a folder that holds no checkpoint, and record whether the load raises and what it changes."""
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    train_steps(ctx, engine, range(1), "before")
    before = collect_training_state(engine)
    with shared_folder() as root:
        folder = root / ctx.variant
        if ctx.variant == EMPTY:
            run_on_rank_0(folder.mkdir)
        ctx.record("process", read_process_state(), 0)
        ctx.record("outcome", {"raised": load_raises(lambda: engine.load(folder))})
        ctx.record("process", read_process_state(), 1)
    record_changes(ctx, before, collect_training_state(engine))
    engine.close()


def judge_refuse_missing(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the load raised on every rank, and changed no weight, optimizer state or setting of the process."""
    for rank, outcome in enumerate(ctx.rank_records("outcome")):
        yield compare_bitwise(ctx.location("raised", Part.GATHER, 0, rank), torch.ones(()), outcome["raised"])
        yield from compare_changes(ctx, rank)
    yield from compare_process_state(ctx, "process", range(2))


LAWS = (
    Law(
        name="state.refuse_missing",
        statement="a load without a checkpoint raises on every rank, and changes no weight, state or process setting",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_refuse_missing,
        judge=judge_refuse_missing,
        features=(Feature.CHECKPOINT,),
        weights_stay_integers=False,
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in (EMPTY, ABSENT)),
        kept_because="the only loads without a file: an engine that does not raise trains from its initial weights",
    ),
)
